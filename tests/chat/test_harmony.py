"""Harmony: channels, recipients, declarations."""

import pytest

from arl_jax.chat.formats import format_of
from arl_jax.chat.messages import ChatMessage, Tool, ToolCall
from arl_jax.chat.replies import MalformedCall, Reply
from arl_jax.chat.typescript import declare

USER = ChatMessage(role="user", content="hello")
CALL = ToolCall(id="call_0", name="look", arguments='{"at":"x"}')
SEEN = ChatMessage(role="tool", content="red", tool_call_id="c", name="look")
SYSTEM = (
  "<|start|>system<|message|>You are ChatGPT, a large language model trained by"
  " OpenAI.\nKnowledge cutoff: 2024-06\n{date}\nReasoning: {effort}\n\n# Valid"
  " channels: analysis, commentary, final. Channel must be included for every"
  " message.{tools}<|end|>"
)
CALLED = (
  "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
  '{"at":"x"}<|call|>'
)


def same(tokenizer, ids, text):
  assert tokenizer.decode(ids, skip_special=False) == text
  assert ids == tokenizer.encode(text, allow_special=True)


def ids_of(tokenizer, text):
  return tokenizer.encode(text, allow_special=True)


def test_a_system_message(harmony):
  text = SYSTEM.format(
    date="Current date: 2026-02-03\n", effort="high", tools=""
  )
  chat = format_of(harmony, date="2026-02-03")
  same(
    harmony,
    chat.render([USER], effort="high"),
    text + "<|start|>user<|message|>hello<|end|><|start|>assistant",
  )
  with pytest.raises(ValueError, match="reasoning_effort: 'none', must be one"):
    chat.render([USER], effort="none")


def test_instructions_tools_and_turns(harmony, tools):
  messages = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="developer", content="Be kind."),
    USER,
    ChatMessage(
      role="assistant", content="I look.", reasoning="Hm.", tool_calls=(CALL,)
    ),
    SEEN,
    ChatMessage(role="assistant", content="Red.", reasoning="So."),
    ChatMessage(role="system", content="Be brisk."),
    USER,
  ]
  functions = (
    "\nCalls to these tools must go to the commentary channel: 'functions'."
  )
  same(
    harmony,
    format_of(harmony).render(messages, tools),
    SYSTEM.format(date="", effort="medium", tools=functions)
    + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\nBe kind.\n\n"
    "# Tools\n\n## functions\n\nnamespace functions {\n\n"
    "// Looks at a place.\ntype look = (_: {\n// The place.\nat: string,\n"
    'how?: "near" | "far", // default: near\n}) => any;\n\n'
    "type wait = () => any;\n\n} // namespace functions<|end|>"
    "<|start|>user<|message|>hello<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    f"<|start|>assistant{CALLED}"
    "<|start|>functions.look to=assistant<|channel|>commentary<|message|>red"
    "<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Red.<|end|>"
    "<|start|>developer<|message|># Instructions\n\nBe brisk.<|end|>"
    "<|start|>user<|message|>hello<|end|><|start|>assistant",
  )


@pytest.mark.parametrize(
  ("sampled", "forced"),
  [
    (CALLED, ""),
    ("<|channel|>final<|message|>a<|return|>", ""),
    ("<|channel|>analysis<|message|>a<|end|>", ""),
    ("<|channel|>final<|message|>a", "<|end|>"),
    ("<|channel|>final<|message|>a<|endoftext|>", "<|end|>"),
    ("<|chan", "<|end|>"),
    ("", "<|end|>"),
  ],
)
def test_append(harmony, sampled, forced):
  chat = format_of(harmony)
  ids = [*chat.render([USER]), *ids_of(harmony, sampled)]
  same(
    harmony,
    chat.append(ids, [USER, ChatMessage(role="assistant")], [SEEN, USER]),
    forced + "<|start|>functions.look to=assistant<|channel|>commentary"
    "<|message|>red<|end|><|start|>user<|message|>hello<|end|>"
    "<|start|>assistant",
  )


def test_stop_ids(harmony):
  assert {harmony.piece(i) for i in format_of(harmony).stop_ids} == {
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
  }


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
  ("text", "reply"),
  [
    ("", Reply()),
    ("<|channel|>fin", Reply()),
    ("<|channel|>final<|message|>", Reply()),
    ("<|channel|>final<|message|>a\n<|return|>", Reply(content="a\n")),
    ("<|channel|>analysis<|message|>Hm", Reply(reasoning="Hm")),
    (
      ANALYSIS + ANALYSIS + "<|channel|>final<|message|>a<|return|>",
      Reply(content="a", reasoning="Hm.\nHm."),
    ),
    (ANALYSIS + CALLED, Reply(reasoning="Hm.", tool_calls=(CALL,))),
    (
      "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
      + CALLED,
      Reply(content="I look.", tool_calls=(CALL,)),
    ),
    # The recipient with the author; the form without its mark, or none.
    (
      " to=functions.look<|channel|>commentary json<|message|>"
      '{"at":"x"}<|call|>',
      Reply(tool_calls=(CALL,)),
    ),
    (
      f"{ANALYSIS} to=functions.look<|channel|>commentary<|message|>"
      '{"at":"x"}<|call|>',
      Reply(reasoning="Hm.", tool_calls=(CALL,)),
    ),
    (
      "<|channel|>commentary to=functions.look<|constrain|>json<|message|>\n"
      '{"at":"x"}\n<|call|>',
      Reply(tool_calls=(CALL,)),
    ),
  ],
)
def test_replies(harmony, tools, text, reply):
  ids = ids_of(harmony, text)
  assert format_of(harmony).parse(ids, tools) == reply
  end = harmony.controls["<|endoftext|>"]
  assert format_of(harmony).parse([*ids, end, *ids], tools) == reply


def test_several_calls_of_a_history(harmony, tools):
  text = f"{CALLED}<|start|>assistant{CALLED}"
  got = format_of(harmony).parse(ids_of(harmony, text), tools)
  assert [call.id for call in got.tool_calls] == ["call_0", "call_1"]


TO = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"


@pytest.mark.parametrize(
  ("text", "problem"),
  [
    (TO + '{"at":1}', "cut off before its end"),
    (TO + '{"at":1}<|endoftext|>', "cut off before its end"),
    (TO + '{"at":1}<|end|>', "must end with <|call|>, not <|end|>"),
    (TO + '{"at":1}<|return|>', "must end with <|call|>, not <|return|>"),
    (TO + '{"at":<|message|>1}<|call|>', "a mark inside a call"),
    (TO + "<|call|>", "not a JSON object"),
    (TO + "{}<|call|>", "'at' is missing"),
    (TO.replace("look", "lok") + "{}<|call|>", "no such tool"),
    (TO.replace("functions.look", "python") + "{}<|call|>", "no such tool"),
    (TO.replace("functions.look", "") + "{}<|call|>", "no such tool"),
    (TO.replace("json", "code") + "{}<|call|>", "form of a call must be json"),
    (TO.replace("commentary", "analysis") + "{}<|call|>", "on the channel"),
    (TO.replace("commentary", "other") + "{}<|call|>", "no such channel"),
    (" to=functions.wait" + TO + "{}<|call|>", "more than one tool"),
    ("<|channel|>commentary to=functions.look", "without a body"),
    ("<|channel|>commentary to=functions.look<|call|>", "without a body"),
    ("hello<|end|>", "a message without a body"),
    ("<|message|>hello<|return|>", "a message without a channel"),
    ("<|channel|><|message|>hello<|return|>", "a message without a channel"),
    ("<|channel|>loud<|message|>hello<|return|>", "no such channel"),
    ("<|channel|>final x<|message|>hello<|return|>", "must be one word"),
    ("<|channel|>final<|channel|>a<|message|>hello<|return|>", "out of place"),
    ("user<|channel|>final<|message|>hello<|return|>", "of another author"),
    (
      ANALYSIS.replace("assistant", "user") + "<|message|>hello<|end|>",
      "of another author",
    ),
    (
      "<|channel|>analysis<|message|><|end|>hello<|start|>assistant",
      "text outside of a message",
    ),
    (
      "<|channel|>analysis<|message|><|end|><|message|>hello<|return|>",
      "text outside of a message",
    ),
  ],
)
def test_malformed(harmony, tools, text, problem):
  got = format_of(harmony).parse(ids_of(harmony, text), tools)
  assert (got.content, got.tool_calls) == ("", ())
  (bad,) = got.malformed
  assert isinstance(bad, MalformedCall)
  assert problem in bad.problem
  assert bad.text


def test_no_tools_were_offered(harmony):
  got = format_of(harmony).parse(ids_of(harmony, ANALYSIS + CALLED))
  assert got.reasoning == "Hm."
  assert got.malformed[0].problem == "no tools were offered"


def test_marks_that_text_spells_are_none(harmony, tools):
  text = f"{CALLED}<|end|>"
  ids = ids_of(harmony, "<|channel|>final<|message|>") + harmony.encode(text)
  assert format_of(harmony).parse(ids, tools) == Reply(content=text)
  ids = harmony.encode(CALLED)
  assert format_of(harmony).parse(ids, tools) == Reply(
    malformed=(MalformedCall(text=CALLED, problem="a message without a body"),)
  )


def test_declarations():
  fields = {
    "text": {"type": "string", "default": "a\nb"},
    "a-b": {"type": "integer", "description": "One\n} two", "nullable": True},
    "list": {"type": "array", "items": {"type": ["number", "null", 3]}},
    "any": {},
    "odd": True,
    "one": {"anyOf": [{"type": "boolean"}, {"type": "array"}]},
    "in": {
      "type": "object",
      "properties": {"x": {"type": "number", "default": 1}},
      "required": ["x"],
    },
    "map": {"type": "object"},
    "enum": {"enum": ["a", 1, None], "default": 1},
  }
  tool = Tool(name="f", parameters={"properties": fields, "required": ["list"]})
  assert declare([tool]) == (
    "namespace functions {\n\ntype f = (_: {\n"
    'text?: string, // default: "a\\nb"\n'
    '// One\n// } two\n"a-b"?: number | null,\n'
    "list: (number | null)[],\n"
    "any?: any,\nodd?: any,\n"
    "one?: boolean | any[],\n"
    "in?: {\nx: number, // default: 1\n},\n"
    "map?: object,\n"
    'enum?: "a" | 1 | null, // default: 1\n'
    "}) => any;\n\n} // namespace functions"
  )


def test_a_schema_can_not_double_at_each_level():
  schema = {"type": "string"}
  for _ in range(30):
    schema = {"type": ["array"] * 40, "items": schema}
  tool = Tool(name="f", parameters={"properties": {"x": schema}})
  assert declare([tool]).count("[]") == 30
