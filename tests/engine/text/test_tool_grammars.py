"""The grammar of each format against texts as the models write them: the parser's own samples."""

from __future__ import annotations

import shutil

import pytest
import tokenizers

from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.grammars.state import GrammarError
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tool_formats import FORMATS
from slipstream.engine.text.tool_formats.base import Tool, Writer
from slipstream.engine.text.tool_formats.minimax_m3 import MARK
from slipstream.engine.text.tools import Reading
from slipstream.errors import RequestError
from slipstream.messages.requests import EngineRequest
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.sampling import SamplingParams
from slipstream.spec.description import read_spec
from tests.engine.text.test_tool_formats import SAMPLES, THINK, TOOLS, WEATHER, WHOLE

STRICT = tuple(
    Tool(
        t.name,
        {
            **t.parameters,
            "type": "object",
            "required": [*t.parameters["properties"]],
            "additionalProperties": False,
        },
    )
    for t in TOOLS
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.for_model(read_spec(tiny_model))


@pytest.fixture
def accepts(tokenizer):
    grammars = Grammars(lambda: tokenizer, 288, lambda tokenizer: tokenizer.eos_token_ids)

    return lambda params, text: allowed(grammars, tokenizer, params, text)


def allowed(grammars, tokenizer, params, text):
    """Whether the grammar takes the whole text, and may end there."""
    sampling = SamplingParams(structured_outputs=params)
    request = EngineRequest(
        request_id="r", prompt_token_ids=(5,), sampling=sampling, eos_token_ids=(1,), max_tokens=9
    )
    if not grammars.begin(request):
        while grammars.is_compiling:
            assert [error for _, error in grammars.compiled() if error] == []
    state = grammars._states["r"]
    try:
        state.accept(tokenizer.encode(text, add_special_tokens=False))
    except GrammarError:
        return False
    return state.matcher.is_accepting()


def reading(name, **more):
    return Reading(
        form=FORMATS[name](), **{"think": None, "offered": STRICT, "enforced": True, **more}
    )


def canonical(name):
    """The sample with the whitespace that the chat templates write."""
    text = SAMPLES[name].replace("</arg_key><arg_value>", "</arg_key>\n<arg_value>")
    text = text.replace("true</arg_value></", "true</arg_value>\n</")
    if name == "harmony":
        return text.split("<|call|>")[0].replace(
            "commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>", ""
        )
    if name == "gigachat3":  # one call
        return f'Let me see.<|function_call|>{{"name": "get_weather", "arguments": {WEATHER}}}'
    if name in ("kimi_k3", "inkling"):
        return "Let me see." + text[text.index(FORMATS[name].trigger) :]
    if name in MUSE:
        said = "to=user<|message|>Let me see.<|eom|><|start|>assistant "
        return text.replace(said, "").removesuffix("<|eot|>")
    return text


def calls_of(name):
    """The sample without the text before the calls."""
    text = canonical(name).removeprefix("Let me see.")
    return text if name in MUSE else text.strip()


MUSE = ("muse", "muse_glimmer")
FINAL = {"harmony": "<|channel|>final<|message|>", **dict.fromkeys(MUSE, " to=user<|message|>")}
"""Beginning of an answer, of formats that have reasoning."""


@pytest.mark.parametrize("name", FORMATS)
def test_what_models_write_is_allowed(name, tokenizer, accepts):
    auto = reading(name).structured(None, tokenizer)
    text = canonical(name)
    assert accepts(auto, text)
    assert not accepts(auto, text.replace("get_weather", "get_whether"))
    assert not accepts(auto, text.replace("days", "day"))
    one = reading(name, parallel=False).structured(None, tokenizer)
    assert accepts(one, text) == (name in ("harmony", "gigachat3"))  # two calls
    must = reading(name, must_call=True).structured(None, tokenizer)
    calls = calls_of(name)
    assert accepts(must, calls)
    assert not accepts(must, "Let me see.")
    if name not in FINAL:
        assert accepts(auto, "Nothing to call.")
        thinking = reading(name, must_call=True, think=THINK, opened=True).structured(
            None, tokenizer
        )
        assert accepts(thinking, f"so <b> {{}}\n</think>\n\n{calls}")
        assert not accepts(thinking, calls)
        both = reading(name, must_call=True, think=THINK).structured(None, tokenizer)
        assert accepts(both, f"<think>\nso\n</think>\n\n{calls}")
        assert accepts(both, calls)
        closed = reading(name, must_call=True, think=THINK, closed=True).structured(None, tokenizer)
        assert accepts(closed, calls)
        assert not accepts(closed, f"<think>\nso\n</think>\n\n{calls}")
    else:
        assert accepts(auto, f"{FINAL[name]}Nothing.")


@pytest.mark.parametrize("name", [*FORMATS, None])
def test_an_answer_with_a_schema(name, tokenizer, accepts):
    schema = StructuredOutputsParams(
        json={"type": "array", "items": {"const": 1}}, disable_any_whitespace=True
    )
    form = None if name is None else FORMATS[name]()
    final = FINAL.get(name, "")
    either = Reading(form=form, think=None, offered=STRICT if form else ()).structured(
        schema, tokenizer
    )
    assert accepts(either, final + "[1,1]")
    assert not accepts(either, final + "[2]")
    if form is not None:
        assert accepts(either, calls_of(name))
    if name not in FINAL:
        thinking = Reading(form=form, think=THINK, opened=True).structured(schema, tokenizer)
        assert accepts(thinking, "[2]</think>\n[1]")
        assert not accepts(thinking, "[1]")


def test_special_tokens_are_named_by_their_number():
    writer = Writer({"<tool_call>": 7, "</think>": 9}.get)
    assert writer.texts("<tool_call>", '"x"') == r'<[7]> "\"x\""'
    name = writer.up_to("</think>")
    assert writer.rules[name] == "ANY <[9]>"


def test_special_tokens_within_a_text_are_found():
    """DSML's mark is a token, and the tags around it are text; Gemma's quotes are tokens."""
    tokens = {"｜DSML｜": 3, '<|"|>': 4}
    writer = Writer(tokens.get, [*tokens, "none"])
    assert writer.text("<｜DSML｜invoke>") == '("<" <[3]> "invoke>")'
    name = writer.up_to("</｜DSML｜parameter>")
    assert writer.rules[name] == f'ANY_{name.upper()} (<[3]> "parameter>")'
    assert writer.rules[f"ANY_{name.upper()}"] == r"/(?s:.*)<\//"
    assert writer.text('<|"|>') == "<[4]>"


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in WHOLE])
def test_calls_are_allowed_where_all_markers_are_special_tokens(name, tiny_model, tmp_path):
    file = tokenizers.Tokenizer.from_file(f"{tiny_model}/tokenizer.json")
    file.add_special_tokens([*dict.fromkeys(FORMATS[name].markers)])
    file.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(f"{tiny_model}/tokenizer_config.json", tmp_path)
    special = Tokenizer.from_pretrained(tmp_path)
    params = reading(name, must_call=True).structured(None, special)
    assert "<[" in params.grammar or name == "minicpm5"
    grammars = Grammars(lambda: special, special.vocab_size, lambda tokenizer: (1,))
    calls = calls_of(name)
    for text, fits in ((calls, True), (calls.replace("get_weather", "get_whether"), False)):
        assert allowed(grammars, special, params, text) == fits


NESTED = Tool(
    "f",
    {
        "type": "object",
        "properties": {
            "xs": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
            "kind": {"enum": ["a", "b"]},
            "o": {
                "type": "object",
                "properties": {"z": {"type": "boolean"}, "A": {"type": ["string", "null"]}},
                "required": ["z"],
            },
            "free": {"type": "object"},
            "any": {},
            "ref": {"$ref": "#/$defs/Point"},
        },
        "required": ["xs"],
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
)


@pytest.mark.parametrize(
    ("written", "fits"),
    [
        ("{xs:[1]}", True),
        ("{xs:[1,2,3]}", True),
        ("{xs:[]}", False),
        ("{xs:[1,2,3,4]}", False),
        ('{kind:<|"|>a<|"|>,xs:[1]}', True),
        ('{kind:<|"|>c<|"|>,xs:[1]}', False),
        ("{}", False),
        ('{o:{A:<|"|>x, {y}<|"|>,z:true},xs:[1]}', True),
        ("{o:{A:null,z:true},xs:[1]}", True),
        ("{o:{A:null},xs:[1]}", False),
        ('{any:[1.5,{k:<|"|><|"|>}],free:{a:{b:null}},xs:[1]}', True),
        ("{ref:{x:1.5},xs:[1]}", True),
        ('{ref:{x:<|"|>1<|"|>},xs:[1]}', False),
    ],
)
def test_nested_values_keep_to_the_schema_in_the_notation_of_gemma(
    written, fits, tokenizer, accepts
):
    """Keys stand in the order in which the template writes them: by the alphabet."""
    params = reading("gemma4", offered=(NESTED,), must_call=True).structured(None, tokenizer)
    assert accepts(params, f"<|tool_call>call:f{written}<tool_call|>") == fits


@pytest.mark.parametrize(
    ("written", "fits"),
    [
        ("<xs>[1]M</xs>", True),
        ("<xs>[]M</xs>", False),
        ("<xs>M<item>1M</item>M</xs>", False),
        ("<xs>[1]M</xs>M<kind>aM</kind>", True),
        ("<xs>[1]M</xs>M<kind>cM</kind>", False),
        ("<xs>[1]M</xs>M<o>M<z>trueM</z>M<A>x <y>M</A>M</o>", True),
        ("<xs>[1]M</xs>M<o>M<A>xM</A>M</o>", False),
        ('<xs>[1]M</xs>M<free>{"a": 1}M</free>', True),
        ("<xs>[1]M</xs>M<free>oM</free>", False),
        ("<xs>[1]M</xs>M<ref>M<x>1.5M</x>M</ref>", True),
        ("<xs>[1]M</xs>M<ref>M<x>oneM</x>M</ref>", False),
    ],
)
def test_nested_values_keep_to_the_schema_as_elements(written, fits, tokenizer, accepts):
    """A list with a length is JSON, and so is an object without known parts."""
    params = reading("minimax_m3", offered=(NESTED,), must_call=True).structured(None, tokenizer)
    text = f'M<tool_call>\nM<invoke name="f">\nM{written}M</invoke>\nM</tool_call>'
    assert accepts(params, text.replace("M", MARK)) == fits


@pytest.mark.parametrize("name", ["a>b", "/a", " a", "", "invoke", "tool_call"])
def test_names_that_no_tag_can_have_are_refused_as_elements(name, tokenizer):
    inner = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    for schema in (inner, {"type": "object", "properties": {"o": inner}}):
        with pytest.raises(RequestError, match="can't be the name of an argument"):
            reading("minimax_m3", offered=(Tool("f", schema),)).structured(None, tokenizer)


def test_a_schema_without_an_end_is_refused_in_the_notation_of_gemma(tokenizer):
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    tool = Tool("f", {**node, "$defs": {"Node": node}})
    with pytest.raises(RequestError, match="nested"):
        reading("gemma4", offered=(tool,)).structured(None, tokenizer)


def test_special_markers_are_tokens(tokenizer, accepts, monkeypatch):
    monkeypatch.setattr(FORMATS["mistral_args"], "trigger", "<|im_end|>")
    for params in (
        reading("mistral_args").structured(None, tokenizer),
        reading("mistral_args", must_call=True).structured(None, tokenizer),
    ):
        assert accepts(params, '<|im_end|>add[ARGS]{"a": 1, "b": 2, "ok": true}')
        assert not accepts(params, '<|im_end|>add[ARGS]{"a": 1, "b": 2, "ok": 3}')


def test_what_cannot_be_enforced():
    bad = Tool("f", {"type": "object", "properties": {"a": {"not": {}}}})
    with pytest.raises(RequestError, match=r"not.*properties\.a") as error:
        reading("hermes", offered=(STRICT[0], bad)).check()
    assert error.value.field == "tools[1].function.parameters"


def test_a_tool_with_very_many_optional_arguments_is_refused_before_its_grammar_is_written(
    tokenizer,
):
    """Optional arguments in a fixed order make the grammar grow with the square of their number."""
    properties = {f"a{i}": {"type": "integer"} for i in range(3000)}
    wide = Tool("f", {"type": "object", "properties": properties})
    with pytest.raises(RequestError, match="make more of them required"):
        reading("pythonic", offered=(wide,)).structured(None, tokenizer)
    few = Tool("f", {"type": "object", "properties": dict(list(properties.items())[:20])})
    assert reading("pythonic", offered=(few,)).structured(None, tokenizer) is not None
