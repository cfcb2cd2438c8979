"""A chat model writes tasks, and nothing that it says is believed."""

import asyncio
import json
import random
import time

import pytest

from arl_jax.data.synthesis.answers import ask, read_answer
from arl_jax.data.synthesis.draft import AuthorFailed, Refused, Request
from arl_jax.data.synthesis.endpoint_author import EndpointAuthor
from arl_jax.data.synthesis.pipeline import Pipeline, SynthesisConfig
from arl_jax.serving import json_endpoint
from arl_jax.serving.chat_endpoint import ChatEndpoint
from tests.data.synthesis import linked_corpus
from tests.data.synthesis.chat_server import (
  ChatServer,
  completion,
  endlessly,
  passages,
  wants,
)
from tests.serving.http_serving import serving

DOMAIN = linked_corpus.DOMAIN
CLUES = {
  "Ada Lovelace": "It has an amber lighthouse.",
  "choir performs": "Its choir sings by the frozen harbour.",
  "Ferries from": "Ferries arrive before the morning market.",
}
QUOTES = {
  "Ada Lovelace": (
    "amber lighthouse", "amber lighthouse was built", "built in Kirkwall"
  ),
  "choir performs": (
    "by the frozen harbour", "beside the frozen harbour", "the Kirkwall choir"
  ),
  "Ferries from": (
    "before the morning market", "before the morning market", "reach Kirkwall"
  ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
  monkeypatch.setattr(json_endpoint, "_WAITS", (0.001, 0.01))


def label(request, words):
  return next(k for text, k in passages(request).items() if words in text)


def quoted(request, quotes):
  return {
    "items": [
      {
        "passage": label(request, words),
        "clue_quotes": [clue],
        "item_quotes": [item],
        "truth_quotes": [truth] if truth else [],
      }
      for words, (clue, item, truth) in quotes.items()
    ]
  }


def right(request):
  """What a good model says of the towns."""
  match wants(request):
    case "explore":
      answer = {
        "answer": "Kirkwall",
        "question": "Which town is it?",
        "clues": [
          {"passage": label(request, words), "text": text}
          for words, text in CLUES.items()
        ],
      }
    case "extend":
      answer = {
        "answer": "Dufftown",
        "question": "Where does the copper come from?",
        "clue": {
          "passage": label(request, "distillery"),
          "text": "A copper distillery sends barrels there.",
        },
      }
    case "quote" if "Answer: Dufftown" in request["messages"][1]["content"]:
      answer = quoted(
        request,
        {
          "distillery": (
            "copper distillery", "copper distillery of", "of Dufftown"
          )
        },
      )  # fmt: skip
    case "quote":
      answer = quoted(request, QUOTES)
    case "distract":
      names = passages(request)
      answer = {
        "distractors": [
          n for text, n in names.items() if "Bagpipes" not in text
        ]
      }
  return json.dumps(answer)


def run(server, *, hops=1, count=1, attempts=4, **options):
  index = linked_corpus.town_index()
  config = SynthesisConfig(
    count=count, hops=(hops,), heldout_share=0, patience=attempts,
    concurrency=options.pop("concurrency", 1),
  )  # fmt: skip

  async def go():
    async with ChatEndpoint(server.url, **{"timeout": 20, **options}) as chat:
      author = EndpointAuthor(chat, index, DOMAIN, name="fake")
      return await Pipeline(index, author, DOMAIN, config).make()

  return asyncio.run(go())


def test_a_good_model_writes_tasks():
  with ChatServer(right) as server:
    (task,) = run(server, token="secret", model="m").tasks
  assert server.headers["authorization"] == "Bearer secret"
  assert {r["model"] for r in server.requests} == {"m"}
  assert [wants(r) for r in server.requests] == ["explore", "quote", "distract"]
  assert task.truth["answer"] == "Kirkwall"
  assert sorted(task.truth["relevant"]) == ["a_0", "b_0", "c_0"]
  # All that a search finds, but d, which names the town, and g.
  assert sorted(task.truth["distractors"]) == ["e_0", "f_0"]
  assert task.provenance["generator"] == "endpoint/1 fake"
  assert all(q["found"] for q in task.provenance["quotes"])


def test_a_good_model_extends_them():
  with ChatServer(right) as server:
    (task,) = run(server, hops=2).tasks
  assert task.truth["answer"] == "Dufftown"
  assert task.truth["bridges"] == ["Kirkwall"]
  assert task.truth["answer_chunks"] == ["d_0"]
  assert len(task.provenance["clues"]) == 4
  assert task.provenance["hops"] == 2


def spoilt(kind, change):
  """A good model that gets one kind of answer wrong."""

  def answer(request):
    if wants(request) != kind:
      return right(request)
    found = json.loads(right(request))
    found = change(found) or found
    return found if isinstance(found, (bytes, str)) else json.dumps(found)

  return answer


def made_up_quotes(found):
  for item in found["items"]:
    item["item_quotes"] = ["purple unicorns galloping everywhere"]


def no_truth(found):
  for item in found["items"]:
    item["truth_quotes"] = ["Kirkwall is not here"]


@pytest.mark.parametrize(
  ("kind", "change", "reason"),
  [
    ("quote", made_up_quotes, "item_quotes_not_found"),
    ("quote", no_truth, "truth_quotes_not_found"),
    ("quote", lambda f: f.update(items=f["items"][:2]), "clue_without_item"),
    ("quote", lambda f: f["items"].append(f["items"][0]), "item_twice"),
    ("quote", lambda f: f.update(items=f["items"] * 9), "malformed_answer"),
    ("quote", lambda f: f["items"][0].update(clue_quotes="x"), "malformed"),
    ("quote", lambda f: f["items"][0].update(passage="P99"), "unknown_passage"),
    ("quote", lambda f: f["items"][0].update(passage=[1]), "unknown_passage"),
    ("explore", lambda f: f.update(answer="Aberdeen"), "answer_in_no_item"),
    ("explore", lambda f: f.update(question="Kirkwall?"), "answer_in_prompt"),
    ("explore", lambda f: f.update(question=7), "malformed_answer"),
    ("explore", lambda f: f.update(question=" "), "malformed_answer"),
    ("explore", lambda f: f.update(question="x" * 3000), "text_too_long"),
    ("explore", lambda f: f.update(clues=f["clues"][:2]), "malformed_answer"),
    ("explore", lambda f: f.update(clues={"P1": "x"}), "malformed_answer"),
    ("explore", lambda f: f["clues"][0].update(passage="a_0"), "unknown_pass"),
    ("distract", lambda f: f.update(distractors=["P0"]), "unknown_passage"),
    ("distract", lambda f: f.update(distractors="P1"), "malformed_answer"),
    ("explore", lambda f: "no JSON at all", "malformed_answer"),
    ("explore", lambda f: json.dumps(f) + " and more", "malformed_answer"),
    ("explore", lambda f: '{"a": 1, "a": 2}', "malformed_answer"),
    ("explore", lambda f: '{"a": NaN}', "malformed_answer"),
    ("explore", lambda f: "[" * 100_000, "malformed_answer"),
    ("explore", lambda f: '{"a": "\\ud800"}', "malformed_answer"),
    ("explore", lambda f: b"<html>not found</html>", "malformed_answer"),
    ("explore", lambda f: b'{"choices": []}', "malformed_answer"),
    ("explore", lambda f: b"\xff\xfe\0", "malformed_answer"),
    ("explore", lambda f: completion("{", "length"), "answer_cut"),
    ("explore", lambda f: completion("x" * 2_000_000), "answer_too_large"),
  ],
)  # fmt: skip
def test_bad_answers_are_counted_and_make_no_task(kind, change, reason):
  with ChatServer(spoilt(kind, change)) as server:
    made = run(server, attempts=1)
  assert made.tasks == ()
  (found,) = made.report.rejected
  assert found.startswith(reason)


def test_markers_in_an_answer_are_broken():
  def change(found):
    found["question"] = "Which <|im_end|> town ; is <c0> it?"

  with ChatServer(spoilt("explore", change)) as server:
    (task,) = run(server).tasks
  assert task.prompt.endswith(" ; Which < |im_end|> town; is < c0> it?")


def test_thoughts_and_fences_around_an_answer_are_taken_off():
  for text in (
    ' {"a": 1}\n',
    '<think>{"b": 2}</think>\n{"a": 1}',
    '```json\n{"a": 1}\n```',
    'so</think>```\n{"a": 1}\n```',
  ):
    assert read_answer(completion(text)) == {"a": 1}
  for text in ('```json\n{"a": 1}', 'Here: {"a": 1}', "[1]", "null", ""):
    with pytest.raises(Refused, match="malformed_answer"):
      read_answer(completion(text))


def test_a_malformed_answer_is_asked_for_once_more():
  seeds = []

  def answer(request):
    if wants(request) == "explore":
      seeds.append(request["seed"])
      if len(seeds) == 1:
        return "Sure! Here is"
    return right(request)

  with ChatServer(answer) as server:
    made = run(server)
  assert len(made.tasks) == 1
  assert not made.report.rejected
  assert seeds[1] == seeds[0] + 1


def test_busy_and_broken_servers_are_tried_again():
  answers = iter([(503, b"busy"), (429, b"slow down"), (500, b"\xff" * 9)])

  def answer(request):
    return next(answers, None) or right(request)

  with ChatServer(answer) as server:
    assert len(run(server).tasks) == 1
  assert len(server.requests) == 6


def asked(url, **options):
  async def go():
    async with ChatEndpoint(url, **options) as chat:
      return await ask(chat, [{"role": "user", "content": "?"}], seed=0)

  return asyncio.run(go())


def test_the_projects_own_server_will_do():
  message = {"role": "user", "content": 'say:{"seed": <seed>}'}

  async def go(url):
    async with ChatEndpoint(url, model="tiny", max_tokens=200) as chat:
      return await ask(chat, [message], seed=7)

  with serving() as server:
    assert asyncio.run(go(server.url)) == {"seed": 7}


def test_a_refusal_is_not_tried_again():
  with ChatServer(lambda _: (401, b"who\nare you?")) as server:
    with pytest.raises(AuthorFailed, match="401, who are"):
      asked(server.url)
    assert len(server.requests) == 1
  # Nor does a token follow a redirection elsewhere.
  with (
    ChatServer(lambda _: (302, b"")) as server,
    pytest.raises(AuthorFailed, match="302"),
  ):
    asked(server.url, token="secret")


def test_a_server_that_is_gone():
  with ChatServer(right) as server:
    url = server.url
  with pytest.raises(AuthorFailed):
    asked(url, tries=2)


def test_an_answer_that_trickles_in_for_ever_is_cut_off():
  began = time.monotonic()
  with ChatServer(lambda _: endlessly(b" ", 0.02)) as server:
    with pytest.raises(AuthorFailed, match=r"nothing in 0\.2 s"):
      asked(server.url, timeout=0.2, tries=2)
    assert len(server.requests) == 2
  assert time.monotonic() - began < 15


def test_an_endless_answer_is_not_read_to_its_end():
  with (
    ChatServer(lambda _: endlessly(b"x" * 65536, 0)) as server,
    pytest.raises(Refused, match="answer_too_large"),
  ):
    asked(server.url, max_bytes=1 << 18)


def test_requests_at_a_time_are_bounded():
  def answer(request):
    time.sleep(0.02)
    return right(request)

  with ChatServer(answer) as server:
    run(server, count=9, attempts=3, concurrency=6)
    assert 1 < server.most <= 6
  with ChatServer(answer) as server:

    async def go():
      message = [{"role": "user", "content": "look relevant"}]
      async with ChatEndpoint(server.url, concurrency=2) as chat:
        await asyncio.gather(*(ask(chat, message, seed=i) for i in range(6)))

    asyncio.run(go())
    assert server.most == 2


def test_documents_of_another_split_are_not_shown():
  index = linked_corpus.town_index()

  async def go(url, documents):
    wanted = Request(
      documents=frozenset(documents), hops=1, draw=random.Random(0)
    )
    async with ChatEndpoint(url) as chat:
      return await EndpointAuthor(chat, index, DOMAIN).explore(wanted)

  with ChatServer(right) as server:
    asyncio.run(go(server.url, "abc"))
    assert len(passages(server.requests[0])) == 3
    with pytest.raises(Refused, match="few_documents"):
      asyncio.run(go(server.url, "ab"))


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("url", "file:///etc/passwd"),
    ("url", "10.0.0.7:8000"),
    ("concurrency", 0),
    ("tries", 0),
    ("max_tokens", 0),
    ("max_bytes", 0),
    ("timeout", 0.0),
    ("temperature", -0.5),
    ("temperature", float("nan")),
  ],
)
def test_refuses_what_cannot_be(field, value):
  with pytest.raises(ValueError, match=f"{field} is "):
    ChatEndpoint(**{"url": "http://localhost:1", field: value})


@pytest.mark.parametrize(
  "url",
  [
    "http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/",
    "http://h:1/v1/chat/completions",
  ],
)  # fmt: skip
def test_the_address_may_end_anywhere(url):
  assert ChatEndpoint(url)._endpoint.url == "http://h:1/v1/chat/completions"
