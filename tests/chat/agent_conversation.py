"""A conversation of the search agent, as a renderer and its format write it."""

from arl_jax.chat.messages import ChatMessage
from arl_jax.chat.messages import ToolCall as ChatCall
from arl_jax.envs.search.tools import SYSTEM, TOOLS
from arl_jax.types import ToolCall

_QUESTION = "Which animal is red?"
_BLOCKS = ("<c0> A fox is red.", "<c1> Dogs bark.")


def appended(renderer):
  """Ids as a harness appends them, up to where the policy goes on."""
  call = ToolCall(name="search_corpus", argument="red fox")
  return [
    *renderer.prompt(_QUESTION),
    *renderer.open_turn(),
    *renderer.calls([call]),
    *renderer.open_tool("search_corpus"),
    *(i for text in _BLOCKS for i in renderer.block(text)),
    *renderer.usage(120, 448),
    *renderer.close_tool(),
    *renderer.open_turn(),
  ]


def rendered(renderer, end=""):
  """Ids of the whole, by the format. Args: end: of the tool's answer."""
  call = ChatCall(
    id="c", name="search_corpus", arguments='{"query": "red fox"}'
  )
  answer = "\n".join([*_BLOCKS, "[Token usage: 120/448]"]) + end
  messages = [
    ChatMessage(role="system", content=SYSTEM),
    ChatMessage(role="user", content=_QUESTION),
    ChatMessage(role="assistant", tool_calls=(call,)),
    ChatMessage(
      role="tool", content=answer, tool_call_id="c", name="search_corpus"
    ),
  ]
  return renderer._format.render(messages, TOOLS)
