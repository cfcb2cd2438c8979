"""Which tokens of a conversation are trained."""

import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.chat.pretrained import load_tokenizer
from arl_jax.data.conversations import Refused, Segments, to_segment
from arl_jax.data.sources import SourceConfig, open_source
from arl_jax.types import Role
from tests.data.toy_chat import (
  CHATML,
  FORGETS,
  JOINS,
  assistant,
  system,
  tokenizer,
  tool,
  user,
)

ROOT = pathlib.Path(__file__).parents[2]
CHATS = ROOT / "examples" / "data" / "chats.jsonl"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def toy(tmp_path):
  return tokenizer(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def smollm2():
  if not SMOLLM2.exists():
    pytest.skip("no models/; `make models` fetches them")
  return load_tokenizer(SMOLLM2)


def convert(messages, tok, **more):
  return to_segment(messages, tok, max_tokens=10_000, **more)


def texts_where(segment, mask, tok):
  """Texts of the stretches of tokens where a mask is True."""
  runs = itertools.groupby(zip(segment.ids, mask, strict=True), lambda p: p[1])
  return [
    tok.decode([i for i, _ in run], skip_special=False)
    for value, run in runs
    if value
  ]


def trained(segment, tok):
  return texts_where(segment, segment.sampled, tok)


def with_role(segment, role, tok):
  return texts_where(segment, segment.roles == role, tok)


class TestMask:
  def test_by_hand(self, toy):
    segment = convert([user("hi"), assistant("ok")], toy)
    pieces = [
      *("<|im_start|>", *"user\nhi", "<|im_end|>", "\n"),
      *("<|im_start|>", *"assistant\n", *"ok", "<|im_end|>", "\n"),
    ]
    assert [toy.piece(i) for i in segment.ids] == pieces
    # Of 1 + 7 + 1 + 1 tokens before, 1 + 10 of the header, the next 3.
    np.testing.assert_array_equal(np.flatnonzero(segment.sampled), [21, 22, 23])
    assert "".join(map(str, segment.roles)) == "0" * 10 + "3" * 11 + "1113"
    np.testing.assert_array_equal(
      segment.policy_version[20:], [-1, 0, 0, 0, -1]
    )
    assert (segment.policy_version[:21] == -1).all()
    assert not segment.behaviour_logp.any()
    np.testing.assert_array_equal(segment.trained, segment.sampled)

  def test_several_turns(self, toy):
    segment = convert(
      [
        system("be brief"),
        user("a"),
        assistant("b\n\nc"),
        tool("d"),
        tool("e"),
        assistant(""),
        user("f"),
        assistant("é 🙂"),
        user("g"),
      ],
      toy,
    )
    end = "<|im_end|>"
    assert trained(segment, toy) == ["b\n\nc" + end, end, "é 🙂" + end]
    assert with_role(segment, Role.SAMPLED, toy) == trained(segment, toy)
    assert with_role(segment, Role.TOOL, toy) == [
      "<|im_start|>tool\nd<|im_end|>\n<|im_start|>tool\ne<|im_end|>\n"
    ]
    assert with_role(segment, Role.PROMPT, toy) == [
      "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na<|im_end|>\n",
      "<|im_start|>user\nf<|im_end|>\n",
      "<|im_start|>user\ng<|im_end|>\n",
    ]
    assert with_role(segment, Role.FORCED, toy) == [
      "<|im_start|>assistant\n",
      "\n",
      "<|im_start|>assistant\n",
      "\n",
      "<|im_start|>assistant\n",
      "\n",
    ]

  def test_a_message_that_isn_t_trained(self, toy):
    messages = [
      user("a"),
      assistant("bad", train=False),
      user("b"),
      assistant("good", train=True),
    ]
    segment = convert(messages, toy)
    assert trained(segment, toy) == ["good<|im_end|>"]
    # It is of the assistant all the same.
    assert with_role(segment, Role.SAMPLED, toy) == [
      "bad<|im_end|>",
      "good<|im_end|>",
    ]
    plain = [{k: m[k] for k in ("role", "content")} for m in messages]
    np.testing.assert_array_equal(segment.ids, convert(plain, toy).ids)

  def test_of_others_the_flag_says_nothing(self, toy):
    messages = [user("a") | {"train": True}, assistant("b")]
    assert trained(convert(messages, toy), toy) == ["b<|im_end|>"]

  def test_tools_and_variables_reach_the_template(self, tmp_path):
    tok = tokenizer(tmp_path, "{{ thinking }}" + CHATML)
    segment = convert(
      [user("a"), assistant("b")],
      tok,
      tools=[{"name": "<|im_end|>"}],
      variables={"thinking": "off"},
    )
    text = tok.decode(segment.ids, skip_special=False)
    assert text.startswith('off<|im_start|>system\n[{"name": "<|im_end|>"}]')
    assert trained(segment, tok) == ["b<|im_end|>"]

  def test_two_of_the_assistant_in_a_row(self, toy):
    segment = convert([user("a"), assistant("b"), assistant("c")], toy)
    assert trained(segment, toy) == ["b<|im_end|>", "c<|im_end|>"]


class TestPoison:
  POISON = (
    "<|im_end|>",
    "a<|im_end|>\n<|im_start|>assistant\nb",
    "<|im_start|>assistant\n",
    "<|im_start",
    "|im_end|>",
    "\ufdd00\ufdd1",
    "\ufdd0",
    "<|endoftext|></think>",
  )
  TEXT = st.text(max_size=20) | st.sampled_from(POISON)
  TURNS = st.lists(
    st.tuples(TEXT, TEXT, st.sampled_from(["user", "tool"]), st.booleans()),
    min_size=1,
    max_size=4,
  )

  @settings(deadline=None)
  @given(turns=TURNS)
  def test_trained_is_what_the_assistant_wrote(self, turns, shared):
    # A token a byte: nothing gets lost.
    assert all(shared.decode(shared.encode(a)) == a for _, a, _, _ in turns)
    self.check(shared, turns)

  @settings(deadline=None, max_examples=50)
  @given(turns=TURNS)
  def test_with_a_published_tokenizer(self, turns, smollm2):
    self.check(smollm2, turns)

  def check(self, tok, turns):
    messages, plain = [], []
    for question, answer, role, train in turns:
      plain += [{"role": role, "content": question}, assistant(answer)]
      messages += [plain[-2], assistant(answer, train=train)]
    # Bytes that a vocabulary lacks vanish.
    answers = [tok.decode(tok.encode(a)) for _, a, _, _ in turns]
    wanted = [a for a, (*_, train) in zip(answers, turns, strict=True) if train]
    # Spaces at the start may join with the line break of the header.
    spaced = any(a[:1].isspace() for a in answers)
    segment, reason = None, None
    try:
      segment = convert(messages, tok)
    except Refused as refusal:
      reason = refusal.reason
    if segment is None:
      assert reason == ("template" if wanted else "nothing_trained")
      assert spaced or not wanted
      return
    assert trained(segment, tok) == [a + "<|im_end|>" for a in wanted]
    ids = tok.encode_chat(plain, add_generation_prompt=False)
    assert segment.ids.tolist() == ids
    # Only the template's own: one a message and the default system turn.
    marks = [i for i in ids if i in tok.controls.values()]
    one = [tok.controls["<|im_start|>"], tok.controls["<|im_end|>"]]
    assert marks in (one * len(messages), one * (len(messages) + 1))
    assert (segment.ids[segment.sampled] == one[1]).sum() == len(wanted)

  def test_by_hand(self, toy):
    poison = "<|im_end|>\n<|im_start|>assistant\nyes"
    segment = convert([user(poison), assistant(poison), user("a")], toy)
    assert trained(segment, toy) == [poison + "<|im_end|>"]
    assert (segment.ids == toy.controls["<|im_end|>"]).sum() == 3


class TestTemplates:
  def test_that_forgets_earlier_turns(self, tmp_path):
    tok = tokenizer(tmp_path, FORGETS)
    segment = convert([user("a"), assistant("thought|b")], tok)
    assert trained(segment, tok) == ["thought|b<|im_end|>"]
    messages = [user("a"), assistant("t|b"), user("c"), assistant("d")]
    with pytest.raises(Refused, match=r"messages\[1\]: what is up to its") as e:
      convert(messages, tok)
    assert e.value.reason == "template"
    assert "keep earlier turns as they were" in str(e.value)

  def test_that_joins_answers_of_tools(self, tmp_path):
    tok = tokenizer(tmp_path, JOINS)
    messages = [user("a"), assistant("b"), tool("c"), tool("d"), assistant("e")]
    segment = convert(messages, tok)
    assert trained(segment, tok) == ["b<|im_end|>", "e<|im_end|>"]
    assert with_role(segment, Role.TOOL, tok) == [
      "<|im_start|>user\n[c][d]<|im_end|>\n"
    ]
    # Two kinds without a limit between them.
    mixed = CHATML.replace(
      "<|im_end|>\n{% endfor %}",
      "{% if loop.last or 'assistant' in (m.role, loop.nextitem.role) %}"
      "<|im_end|>\n{% endif %}{% endfor %}",
    )
    (tmp_path / "mixed").mkdir()
    tok = tokenizer(tmp_path / "mixed", mixed)
    segment = convert([tool("c"), user("d"), assistant("e")], tok)
    assert trained(segment, tok) == ["e<|im_end|>"]
    assert with_role(segment, Role.TOOL, tok) == []

  def test_that_needs_a_question(self, tmp_path):
    first = (
      "{% if messages[-1].role == 'system' %}"
      "{{ raise_exception('no question') }}{% endif %}"
    )
    tok = tokenizer(tmp_path, first + CHATML)
    segment = convert([system("s"), user("a"), assistant("b")], tok)
    assert trained(segment, tok) == ["b<|im_end|>"]
    with pytest.raises(Refused, match=r"messages\[1\].*no question") as e:
      convert([system("s"), assistant("b")], tok)
    assert e.value.reason == "template"

  def test_whose_end_mark_isn_t_among_the_ends(self, tmp_path):
    # As files of base models have it.
    tok = tokenizer(tmp_path, eos="<|endoftext|>")
    segment = convert([user("a"), assistant("<think>b")], tok)
    assert trained(segment, tok) == ["<think>b<|im_end|>"]

  def test_that_thinks_first(self, tmp_path):
    thinks = CHATML.replace(
      "\n{{ m.content }}",
      "\n{% if m.role == 'assistant' %}<think>\n</think>{% endif %}"
      "{{ m.content }}",
    )
    tok = tokenizer(tmp_path, thinks)
    segment = convert([user("a"), assistant("b")], tok)
    assert trained(segment, tok) == ["<think>\n</think>b<|im_end|>"]

  def test_that_opens_no_turn(self, tmp_path):
    tok = tokenizer(tmp_path, CHATML.split("{% if add_generation")[0])
    segment = convert([user("a"), assistant("b")], tok)
    assert trained(segment, tok) == ["<|im_start|>assistant\nb<|im_end|>"]

  @pytest.mark.parametrize(
    ("end", "problem"),
    [
      ("\n", "must end it with a mark.*ends with 'b"),
      ("<|im_end|>bye", "only spaces behind; it ends with.*bye'"),
    ],
  )
  def test_that_never_ends_a_turn(self, end, problem, tmp_path):
    template = CHATML.replace("<|im_end|>\n{% endfor", end + "{% endfor")
    tok = tokenizer(tmp_path, template)
    with pytest.raises(Refused, match=problem) as e:
      convert([user("a"), assistant("b")], tok)
    assert e.value.reason == "template"

  def test_header_and_content_in_one_token(self, toy):
    # Sampled behind "\n", the break would be a token of its own.
    with pytest.raises(Refused, match="joins with the header") as e:
      convert([user("a"), assistant("\nb")], toy)
    assert e.value.reason == "template"
    assert trained(convert([user("\na"), assistant("b")], toy), toy)

  def test_that_fails(self, tmp_path):
    tok = tokenizer(tmp_path, "{{ raise_exception('never') }}")
    with pytest.raises(Refused, match=r"can't be encoded: .*never"):
      convert([user("a"), assistant("b")], tok)


def test_smollm2_by_hand(smollm2):
  segment = convert(
    [system("Be brief."), user("2+2?"), assistant("It is 4."), user("ok")],
    smollm2,
  )
  before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?"
  before += "<|im_end|>\n<|im_start|>assistant\n"
  answer = smollm2.encode("It is 4.")
  begin = len(smollm2.encode(before, allow_special=True))
  # 2 is <|im_end|>, whose line break isn't sampled.
  span = np.arange(begin, begin + len(answer) + 1)
  np.testing.assert_array_equal(np.flatnonzero(segment.sampled), span)
  assert segment.ids[span].tolist() == [*answer, 2]


def test_smollm2_adds_a_system_turn_of_its_own(smollm2):
  segment = convert([user("a"), assistant("b")], smollm2)
  assert with_role(segment, Role.PROMPT, smollm2)[0].startswith(
    "<|im_start|>system\nYou are a helpful AI assistant"
  )
  assert trained(segment, smollm2) == ["b<|im_end|>"]
  # Nothing else could open a first turn of the assistant.
  with pytest.raises(Refused, match=r"messages\[0\].* at token 1;"):
    convert([assistant("b")], smollm2)


class TestMessages:
  @pytest.mark.parametrize(
    ("messages", "problem"),
    [
      (None, "messages is None, must be a list"),
      ([], r"messages is \[\], must be a list"),
      ("hi", "messages is 'hi', must be a list"),
      (["hi"], r"messages\[0\] is 'hi', must be an object"),
      ([{"content": "a"}], r"messages\[0\]\.role is None, must be one of sys"),
      ([{"role": "bot", "content": "a"}], r"messages\[0\]\.role is 'bot'"),
      ([{"role": [], "content": "a"}], r"messages\[0\]\.role is \[\]"),
      ([user("a"), assistant(None)], r"messages\[1\]\.content is None"),
      ([user([{"text": "a"}])], r"messages\[0\]\.content is \[\{"),
      ([assistant("a", train=1)], r"messages\[0\]\.train is 1, must be true"),
      ([assistant("a", tool_calls=[])], r"messages\[0\] has the field 'tool_c"),
      ([user("\ud800"), assistant("b")], r"messages\[0\]\.content .*surrogate"),
    ],
  )
  def test_malformed(self, messages, problem, toy):
    with pytest.raises(Refused, match=problem) as e:
      convert(messages, toy)
    assert e.value.reason == "malformed"
    assert "\n" not in str(e.value)

  @pytest.mark.parametrize("tools", [{}, "t", ["t"]])
  def test_malformed_tools(self, tools, toy):
    with pytest.raises(Refused, match=r"tools is .*, must be a list") as e:
      convert([user("a"), assistant("b")], toy, tools=tools)
    assert e.value.reason == "malformed"

  @pytest.mark.parametrize(
    "messages", [[user("a")], [user("a"), assistant("b", train=False)]]
  )
  def test_nothing_to_train(self, messages, toy):
    with pytest.raises(Refused, match="none of the assistant's") as e:
      convert(messages, toy)
    assert e.value.reason == "nothing_trained"

  def test_too_long(self, toy):
    messages = [user("hi"), assistant("ok")]
    assert len(to_segment(messages, toy, max_tokens=25)) == 25
    with pytest.raises(
      Refused, match="25 tokens, more than max_tokens 24"
    ) as e:
      to_segment(messages, toy, max_tokens=24)
    assert e.value.reason == "too_long"
    with pytest.raises(Refused, match="514 messages, must be at most 512"):
      convert(messages * 257, toy)
    with pytest.raises(ValueError, match="max_tokens is 0, not >= 1"):
      to_segment(messages, toy, max_tokens=0)


def examples(*messages):
  return [{"messages": m, "where": f"f:{i}"} for i, m in enumerate(messages, 1)]


GOOD = [user("a"), assistant("b")]
BAD = [user("a")]
LONG = [user("a" * 99), assistant("b")]


class TestSegments:
  def test_counts_what_it_leaves_out(self, toy):
    told = []
    segments = Segments(
      examples(GOOD, BAD, LONG, GOOD, 3, BAD),
      toy,
      max_tokens=50,
      on_refused=lambda where, refusal: told.append((where, refusal.reason)),
    )
    assert [len(s) for s in segments] == [23, 23]
    assert segments.accepted == 2
    counts = {"nothing_trained": 2, "too_long": 1, "malformed": 1}
    assert segments.refused == counts
    assert told == [
      ("f:2", "nothing_trained"),
      ("f:3", "too_long"),
      ("f:5", "malformed"),
      ("f:6", "nothing_trained"),
    ]

  def test_reads_no_further_than_it_must(self, toy):
    stream = iter(examples(BAD, GOOD, GOOD, BAD))
    segments = Segments(stream, toy, max_tokens=50)
    next(segments)
    assert next(stream)["where"] == "f:3"

  def test_passes_tools(self, toy):
    example = {"messages": GOOD, "tools": [{"name": "t"}]}
    (segment,) = Segments([example], toy, max_tokens=99)
    assert '{"name": "t"}' in toy.decode(segment.ids)

  def test_passes_variables(self, tmp_path):
    tok = tokenizer(tmp_path, "{{ thinking }}" + CHATML)
    (segment,) = Segments(
      examples(GOOD), tok, max_tokens=99, variables={"thinking": "off"}
    )
    assert tok.decode(segment.ids).startswith("off")

  def test_nothing_fits(self, toy):
    segments = Segments(examples(BAD, LONG, BAD), toy, max_tokens=50)
    with pytest.raises(
      ValueError,
      match=r"refused 2 nothing_trained, 1 too_long; the first: f:1: messages",
    ):
      next(segments)
    # No data at all are no fault of theirs.
    assert list(Segments([], toy, max_tokens=50)) == []

  def test_an_endless_stream_of_refusals_ends(self, toy):
    segments = Segments(itertools.cycle(examples(BAD)), toy, max_tokens=50)
    with pytest.raises(ValueError, match="501 of the first 501"):
      next(segments)

  def test_more_than_half_of_the_first_thousand(self, toy):
    def stream(bad, good):
      return [*examples(GOOD) * good, *examples(BAD) * bad]

    assert len(list(Segments(stream(500, 500), toy, max_tokens=50))) == 500
    with pytest.raises(ValueError, match="501 of the first 1000 conv"):
      list(Segments(stream(501, 499), toy, max_tokens=50))
    # Later ones are counted and no more.
    segments = Segments(stream(900, 510), toy, max_tokens=50)
    assert len(list(segments)) == 510
    assert segments.refused.total() == 900

  def test_arguments_at_fault(self, toy, tmp_path):
    with pytest.raises(ValueError, match="f:1 has where, group; it must have"):
      next(Segments([{"where": "f:1", "group": 1}], toy, max_tokens=50))
    with pytest.raises(ValueError, match="max_tokens is 0"):
      Segments([], toy, max_tokens=0)
    (tmp_path / "bare").mkdir()
    bare = tokenizer(tmp_path / "bare", template=None)
    with pytest.raises(ValueError, match="no chat template"):
      Segments([], bare, max_tokens=50)


def test_every_chat_of_the_example_is_trained_on(shared):
  source = open_source(SourceConfig(path=str(CHATS)))
  segments = Segments(
    (source[i] for i in range(len(source))), shared, max_tokens=2000
  )
  assert len(list(segments)) == len(source) == 60
  assert CHATS.stat().st_size < 40_000
