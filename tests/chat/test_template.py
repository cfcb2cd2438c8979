"""Chat templates: what transformers offers, and what a hostile one can't do."""

import datetime
import time

import pytest

from arl_jax.chat.template import ChatTemplate

MESSAGES = [
  {"role": "user", "content": "a < b & c"},
  {"role": "assistant", "content": "Ja, é"},
]


def render(source, **variables):
  return ChatTemplate(source).render({"messages": MESSAGES, **variables})


FOR = "{%% for m in messages%s %%}%s{%% endfor %%}"


@pytest.mark.parametrize(
  ("source", "text"),
  [
    # A newline after a tag and blanks before it vanish.
    ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
    (FOR % ("", "{{ loop.index }}{{ m.role[0] }}"), "1u2a"),
    (
      FOR % ("", "{{ m['role'] }}{% if not loop.last %},{% endif %}"),
      "user,assistant",
    ),
    (FOR % (" if m.role == 'user'", "{{ m.role }}"), "user"),
    (FOR % ("", "{{ loop.length }}{% break %}"), "2"),
    (FOR % (" recursive", "{{ m.role }}"), "userassistant"),
    (FOR % ("", "{{ m.role.replace('u', '-') }}"), "-serassistant"),
    (FOR % ("", "{{ '-'.join([m.role, 1]) }}"), "user-1assistant-1"),
    (FOR % ("", "{% set x = 1 %}{{ m.role.startswith('u') }}"), "TrueFalse"),
    (
      "{% for k, v in {'x': 1}.items() %}{{ k ~ v ~ none }}{% endfor %}",
      "x1None",
    ),
    ("{% for m in absent %}{% else %}none{% endfor %}", "none"),
    ("{{ messages[0].content | tojson }}", '"a < b & c"'),
    ("{{ messages[1].content | tojson }}", '"Ja, é"'),
    ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
    ("{{ messages | map(attribute='role') | join('+') }}", "user+assistant"),
    ("{{ ', '.join(['x', 'y']) }}{{ 'aXa'.replace('a', 'b') }}", "x, ybXb"),
    ("{{ 'a\nb' | indent(2) }}{{ 'aa' | replace('a', 'c', 1) }}", "a\n  bca"),
    ("{{ messages[::-1][0].role }}{{ messages[1:] | length }}", "assistant1"),
    (
      "{% set ns = namespace(n=0) %}"
      + FOR % ("", "{% set ns.n = ns.n + 1 %}")
      + "{{ ns.n }}",
      "2",
    ),
    (
      "{% macro f(x, y=2) %}[{{ x }}{{ y }}]{% endmacro %}{{ f(1, y=3) }}",
      "[13]",
    ),
    ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "Ja, é!"),
    ("{{ 7 % 4 }}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "38abab[1, 2]"),
    ("{{ 'x,y'.split(',')[-1] }}{{ ' z '.strip() }}", "yz"),
    ("{{ absent }}{{ absent is defined }}", "False"),
    ("{% set t %}in {{ 'side' }}{% endset %}{{ t }}", "in side"),
  ],
)
def test_renders(source, text):
  assert render(source) == text


def test_today():
  year = datetime.datetime.now().year
  assert int(render("{{ strftime_now('%Y') }}")) in (year, year + 1)


def test_a_message_of_the_template_is_passed_on():
  with pytest.raises(ValueError, match=": roles must alternate"):
    render("{{ raise_exception('roles must\nalternate') }}")


@pytest.mark.parametrize(
  ("source", "problem"),
  [
    ("{% for %}", "Expected an expression"),
    ("{{" + "(" * 5000, "recursion"),
    ("x" * (1 << 21), "must be at most 1048576"),
  ],
)
def test_what_is_no_template(source, problem):
  with pytest.raises(ValueError, match=problem):
    ChatTemplate(source)


DOUBLE = (
  "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}"
  "{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x%s }}"
)

LOOP = "{%% for i in range(99999) %%}%s{%% endfor %%}"


@pytest.mark.parametrize(
  ("source", "problem"),
  [
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.__class__.mro() }}", "unsafe"),
    ("{{ raise_exception.__globals__.os }}", "unsafe"),
    ("{{ namespace.__init__.__globals__ }}", "unsafe"),
    ("{{ (messages | attr('__class__')) }}", "No filter named 'attr'"),
    ("{{ self._TemplateReference__context.x }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ messages[0].update({'role': 'system'}) }}", "unsafe"),
    ("{% include '/etc/hostname' %}", "no loader"),
    ("{% import 'os' as os %}", "no loader"),
    ("{{ '{0.__class__}'.format(1) }}", "'format' of 'str' object is unsafe"),
    ("{{ '{:1000000000}'.format(1) }}", "'format' of 'str' object is unsafe"),
    ("{{ '%1000000000d' % 1 }}", "isn't allowed"),
    ("{{ 'x' * 10 ** 10 }}", "a text of more than"),
    ("{{ [1] * 10 ** 10 }}", "a text of more than"),
    ("{{ ''.ljust(10 ** 10) }}", "unsafe"),
    ("{{ '' | center(10 ** 10) }}", "No filter"),
    ("{{ 'x\n' | indent(10 ** 10) }}", "a text of more than"),
    ("{{ [[1]] | tojson(indent=10 ** 10) }}", "indent"),
    ("{{ 9 ** 9 ** 9 }}", "above 64"),
    (DOUBLE % ("9", "ns.x * ns.x", ""), "product"),
    (DOUBLE % ("'ab'", "ns.x ~ ns.x", "|length"), "a text of more than"),
    (DOUBLE % ("'ab'", "ns.x + ns.x", "|length"), "a text of more than"),
    (DOUBLE % ("'aa'", "ns.x.replace('a', ns.x)", "|length"), "a text of more"),
    (
      DOUBLE % ("'aa'", "ns.x | replace('a', ns.x)", "|length"),
      "a text of more",
    ),
    (DOUBLE % ("'a'", "[ns.x, ns.x] | join", "|length"), "a text of more than"),
    (DOUBLE % ("[1]", "[ns.x, ns.x]", ""), "a text of more than"),
    (DOUBLE % ("[1]", "[ns.x, ns.x]", "|tojson"), "a text of more than"),
    (LOOP % "{{ 'x' * 999 }}", "a text of more"),
    (
      "{% set t %}" + LOOP % "{{ 'x' * 999 }}" + "{% endset %}",
      "a text of more",
    ),
    (LOOP % (LOOP % ""), "loop rounds"),
    ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ absent.x.y }}", "undefined"),
  ],
)
def test_hostile_templates(source, problem):
  began = time.monotonic()
  with pytest.raises(ValueError, match=problem) as error:
    render(source)
  assert str(error.value).startswith("chat template: ")
  assert "\n" not in str(error.value)
  assert time.monotonic() - began < 30


def test_messages_stay_as_they_were():
  messages = [{"role": "user", "content": "x"}]
  with pytest.raises(ValueError, match="unsafe"):
    ChatTemplate("{{ messages.clear() }}").render({"messages": messages})
  assert messages == [{"role": "user", "content": "x"}]


def test_each_rendering_has_its_own_steps():
  # Twice 600 000 rounds are more than one rendering has.
  source = (
    "{% for i in range(6) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
  )
  template = ChatTemplate(source)
  assert template.render({}) == ""
  assert template.render({}) == ""
