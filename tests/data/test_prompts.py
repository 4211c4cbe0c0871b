"""Prompts: the same text and tokens as transformers' `apply_chat_template` gives, and the old ones where there is no template."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import ConfigError, Data
from areal_hpc.data.datasets import Problem, load_problems
from areal_hpc.data.prompts import Prompts, chat_renderer
from areal_hpc.models.tokenizer import Tokenizer, build

CHATML = """{#- turns between markers, a default system message, thinking cut from earlier answers -#}
{%- set ns = namespace(seen_user=false) %}
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.seen_user = true %}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson(indent=2) }}{% endif %}
{%- if not ns.seen_user %}{{ raise_exception('No user message.') }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{ '<|head|>system<|/head|>\\n\\n' }}
    {%- if strftime_now is defined %}
Year: {{ strftime_now('%Y') }}

    {%- endif %}
    {% if system %}
{{ system }}
    {% endif %}
{{ '<|eot|>' }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Turns must alternate user/assistant.') }}
    {%- endif %}
    {{- '<|head|>' ~ message['role'] ~ '<|/head|>\\n\\n' ~ message['content'] | trim ~ '<|eot|>' }}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}
"""

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<bos>"]
TEMPLATES = {"chatml": CHATML, "headers": HEADERS}
TEXTS = st.text("ab 12?\n\t{}%\"'<|>é乘🧮\\", min_size=1, max_size=40).filter(str.strip)


def problem(question="What is 6*7?", messages=()):
    return Problem(0, question, "42", "file", messages=messages)


def make_folder(folder, template, where="tokenizer_config.json"):
    """A tokenizer that puts <bos> before every text, with a chat template."""
    import tokenizers

    base = build(load_problems(Data(size=50)), "\n")
    inner = tokenizers.Tokenizer.from_str(base.files["tokenizer.json"].decode())
    inner.add_special_tokens(SPECIAL)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", inner.token_to_id("<bos>"))])
    settings = json.loads(base.files["tokenizer_config.json"]) | {"bos_token": "<bos>"}
    folder.mkdir()
    if template is not None and where == "tokenizer_config.json":
        settings["chat_template"] = template
    elif template is not None:
        (folder / where).write_text(template)
    (folder / "tokenizer.json").write_text(inner.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="module", params=[(name, where) for name in TEMPLATES for where in ("tokenizer_config.json", "chat_template.jinja")], ids=str)
def both(request, tmp_path_factory):
    """(our tokenizer, transformers' tokenizer) of the same folder."""
    from transformers import PreTrainedTokenizerFast

    name, where = request.param
    folder = make_folder(tmp_path_factory.mktemp("model") / "m", TEMPLATES[name], where)
    return Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)


CONVERSATIONS = st.tuples(TEXTS | st.none(), st.lists(st.tuples(TEXTS, TEXTS), max_size=2), TEXTS)


@settings(max_examples=40, deadline=None)
@given(conversation=CONVERSATIONS)
def test_text_and_tokens_are_those_of_transformers(both, conversation):
    ours, theirs = both
    system, turns, last = conversation
    messages = [
        *([("system", system)] if system else []),
        *((role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)),
        ("user", last),
    ]
    plain = [{"role": role, "content": content} for role, content in messages]
    prompts = Prompts(Data(), ours)
    given_problem = problem(last, tuple(messages) if len(messages) > 1 else ())
    assert prompts.uses_template
    assert prompts.text(given_problem) == theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert prompts.tokens(given_problem).tolist() == expected
    assert expected.count(theirs.bos_token_id) == (1 if "<bos>" in prompts.text(given_problem) else 0)


@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
def test_replies_continue_the_conversation_as_transformers_renders_it(both, text):
    """Prompt, the model's turn with its end token, reply: the tokens of the whole conversation in `transformers`."""
    ours, theirs = both
    prompts, answer = Prompts(Data(suffix=""), ours), "6*7 is 42"
    messages = [("user", "What is 6*7?"), ("assistant", answer), ("user", text)]
    expected = theirs.apply_chat_template([{"role": role, "content": content} for role, content in messages], add_generation_prompt=True, tokenize=False)
    so_far = prompts.text(problem()) + answer
    assert expected.startswith(so_far)
    rest = ours.encode(expected.removeprefix(so_far), add_special_tokens=False).tolist()
    assert prompts.reply_tokens(text).tolist() == (rest[1:] if rest[0] in ours.stop_token_ids else rest)


def test_the_token_that_ended_a_turn_is_not_repeated(tmp_path):
    """<|im_end|> is what the model of this folder ends its turns with, and what the template puts behind them."""
    folder = make_folder(tmp_path / "m", CHATML)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": Tokenizer.from_folder(folder).encode("<|im_end|>", add_special_tokens=False).tolist()})
    )
    tokenizer = Tokenizer.from_folder(folder)
    reply = tokenizer.decode(Prompts(Data(), tokenizer).reply_tokens("5"), skip_special_tokens=False)
    assert reply.startswith("\n<|im_start|>") and reply.count("<|im_end|>") == 1 and "\n5<|im_end|>\n<|im_start|>" in reply


def test_replies_without_a_template_are_the_text_alone(tmp_path):
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path / "m", None))
    assert tokenizer.decode(Prompts(Data(), tokenizer).reply_tokens("1\n2"), skip_special_tokens=False) == "1\n2", "and no <bos> in the middle"


def test_system_prompt_and_suffix_with_a_template(both):
    ours, theirs = both
    data = Data(system_prompt="Think first.", suffix="\nEnd with a box.\n")
    expected = theirs.apply_chat_template(
        [{"role": "system", "content": "Think first."}, {"role": "user", "content": "What is 6*7?\nEnd with a box."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert Prompts(data, ours).text(problem()) == expected
    other = problem(messages=(("system", "Be brief."), ("user", "What is 6*7?")))
    assert Prompts(data, ours).text(other) == expected  # the option wins over the data's
    assert "Be brief." in Prompts(Data(), ours).text(other)


def test_a_template_can_be_left_out(both):
    ours, theirs = both
    prompts = Prompts(Data(chat_template="none"), ours)
    assert not prompts.uses_template and prompts.text(problem()) == "What is 6*7?\n"
    assert prompts.tokens(problem()).tolist() == theirs("What is 6*7?\n").input_ids


@pytest.fixture(scope="module")
def small():
    return build(load_problems(Data(size=50)), "\n")


def test_the_small_model_reads_what_it_always_has(small):
    problems = load_problems(Data(size=50))
    prompts = Prompts(Data(), small)
    for each in problems.train:
        assert prompts.text(each) == each.question + "\n"
        assert prompts.tokens(each).tolist() == small.encode(each.question + "\n").tolist()


def test_system_messages_without_a_template(small):
    with_system = problem(messages=(("system", "Be brief."), ("user", "What is 6*7?")))
    assert Prompts(Data(), small).text(with_system) == "Be brief.\n\nWhat is 6*7?\n"
    assert Prompts(Data(system_prompt="Think."), small).text(with_system) == "Think.\n\nWhat is 6*7?\n"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.text("ab 12é乘🧮", min_size=1, max_size=60).filter(str.strip), min_size=4, max_size=12, unique_by=lambda text: " ".join(text.split()).casefold()
    ),
    st.integers(3, 70),
)
def test_overlong_is_measured_in_the_models_tokens(tmp_path_factory, small, questions, limit):
    path = tmp_path_factory.mktemp("data") / "d.jsonl"
    path.write_text("".join(json.dumps({"question": question, "answer": "1"}) + "\n" for question in questions))
    data = Data(path=str(path), max_prompt_tokens=limit)
    fits = {question for question in questions if len(small.encode(question + "\n")) <= limit}
    problems = load_problems(data)
    try:
        left = Prompts(data, small).fitting(problems)
    except ConfigError:
        assert any(not fits & {each.question for each in side} for side in (problems.train, problems.heldout))
        return
    assert {each.question for each in (*left.train, *left.heldout)} == fits
    assert left.report.num_overlong == len(questions) - len(fits)


# ---- templates that are no good


def render(source, **settings):
    renderer = chat_renderer({"tokenizer_config.json": json.dumps({"chat_template": source, **settings}).encode()})
    return renderer and renderer([("user", "Hi")])


def test_without_a_template_there_is_no_renderer():
    assert chat_renderer({}) is None and chat_renderer({"tokenizer_config.json": b'{"chat_template": null}'}) is None


def test_a_list_of_templates_has_a_default():
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ messages[0].content }}"}]
    assert render(named) == "DHi"
    with pytest.raises(ConfigError, match="none of its chat templates is named 'default'; there are 'tool_use'"):
        render(named[:1])


def test_special_tokens_may_be_objects():
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>") == "<s>Hi</s>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "chat template, line 1"),
        ("{{ raise_exception('System role not supported') }}", "refuses a conversation of user: System role not supported; use --data.chat-template none"),
        ("{{ messages[7].content.x }}", "refuses a conversation"),
        ("{{ 1 / 0 }}", "refuses a conversation"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
    ],
)
def test_templates_that_fail_or_reach_out(source, message):
    with pytest.raises(ConfigError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_the_option_is_part_of_data():
    assert {"chat_template", "system_prompt", "suffix"} <= {item.name for item in dataclasses.fields(Data)}
