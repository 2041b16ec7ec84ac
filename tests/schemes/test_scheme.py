"""The grammar of schemes, their refusals, and the catalogue."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbits.codecs import CODECS as CODEC_CLASSES
from kvbits.codecs import Affine, Exact, Fp8, LloydMax, NormalFloat, Rotated
from kvbits.schemes.catalogue import ALIASES, BY_NAME, CATALOGUE, RECOMMENDED
from kvbits.schemes.grammar import split_schemes
from kvbits.schemes.names import parse_codec
from kvbits.schemes.scheme import BLOCK_TOKENS, BLOCKS, RESIDUAL_TOKENS, SINK_TOKENS, Override, Scheme
from table import CATALOGUE_SCHEMES, CODECS, SCHEMES, SchemeCase

# -- grammar -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SCHEMES, ids=str)
def test_every_spelling_means_its_codecs_and_round_trips(case: SchemeCase) -> None:
    scheme = Scheme.parse(case.spelling)
    assert (scheme.key, scheme.value) == (parse_codec(case.key.spelling), parse_codec(case.value.spelling))
    assert (scheme.sinks, scheme.block, scheme.overrides) == (SINK_TOKENS, BLOCK_TOKENS, ())
    assert scheme.residual == (None if case.spelling == "exact" else RESIDUAL_TOKENS)
    assert scheme.packs == (case.spelling != "exact")
    assert (scheme.pre_rope, scheme.centred) == (case.pre_rope, False)
    assert scheme.needs_calibration == (case.key.calibrated or case.value.calibrated)
    bits = (scheme.key.bits_per_element(128, 64) + scheme.value.bits_per_element(128, 64)) / 2
    assert bits == case.bits
    assert_round_trip(scheme)


def assert_round_trip(scheme: Scheme) -> None:
    again = Scheme.parse(str(scheme))
    assert again == scheme and str(again) == str(scheme) and hash(again) == hash(scheme)
    assert Scheme.parse(str(scheme).upper().replace(",", " , ")) == scheme
    assert Scheme.from_json(json.loads(json.dumps(scheme.to_json()))) == scheme


def test_codecs_round_trip_through_their_canonical_spelling() -> None:
    for case in CODECS:
        codec = parse_codec(case.spelling)
        assert parse_codec(str(codec)) == codec and str(parse_codec(str(codec))) == str(codec), case


@pytest.mark.parametrize(
    ("loose", "canonical"),
    [
        ("int4,outliers=1%", "int4-1%"),
        ("int4-1.0%", "int4-1%"),
        ("int4-.5%", "int4-0.5%"),
        ("int4 , Outliers = 0.50 %", "int4-0.5%"),
        ("int4-1%,outliers=1%", "int4-1%"),
        ("int4-0%", "int4"),
        ("int4-0.0001%", "int4-0.001%"),  # the smallest share there is
        ("kivi4,outliers=2%", "kivi4-2%"),
        ("k=int4-channel-1%,v=int4-gs32-1%", "kivi4-1%"),
        ("k=int4-1%,v=int4", "k=int4-1%,v=int4"),
        ("k=int4,v=int4,outliers=1%", "int4-1%"),
        ("nuq3-1%", "nuq3-1%"),
        ("nuq3,outliers=1%,qnorm", "nuq3-1%-qnorm"),
        ("nuq2-1%-qnorm,qnorm", "nuq2-1%-qnorm"),
        ("nuq3,pre-rope", "nuq3"),
        ("nuq3,post-rope", "nuq3,post-rope"),
        ("k=nuq3-static,v=nuq3-token", "nuq3,post-rope"),
        ("k=nuq3-static,v=nuq3-token,pre-rope", "nuq3"),
        ("k=nuq3,v=int4", "k=nuq3-static,v=int4,pre-rope"),
        ("nuq3/int4", "k=nuq3-static,v=int4,pre-rope"),
        ("int4/nuq3", "k=int4,v=nuq3-token"),
        ("k=int4-calibrated,v=int4", "int4-calibrated"),
        ("k=int4-calibrated,v=int4,post-rope", "int4-calibrated,post-rope"),
        ("k=int4,v=int4-calibrated", "k=int4,v=int4-calibrated"),
        ("k=int4-calibrated,v=int4-calibrated", "k=int4-calibrated,v=int4-calibrated"),
        ("int4,pre-rope,centred", "int4,pre-rope,centred"),
        ("centred,int4", "int4,centred"),
        ("int4,uncentred,post-rope", "int4"),
        ("rot4,centred,sinks=0", "rot4,centred,sinks=0"),
        ("lm4, Centred", "lm4,centred"),
        ("exact,pre-rope", "exact,pre-rope"),
        ("int4,layers[0]=int4-1%,layers[1]=kivi4-1%", "int4,layers[0]=int4-1%,layers[1]=kivi4-1%"),
        ("int4,layers[0]=int4-calibrated/lm4,post-rope", "int4,post-rope,layers[0]=int4-calibrated/lm4"),
        ("int4,outliers=1%,layers[0]=int4", "int4-1%,layers[0]=int4"),  # layers that are named have what is named
        ("INT4", "int4"),
        (" int4 , residual = 64 ", "int4,residual=64"),
        ("int4-gs64", "int4"),
        ("int4-channel-gs32", "int4-channel"),
        ("k=int4-channel,v=int4-gs32", "kivi4"),
        ("v=int4-gs32,k=int4-channel", "kivi4"),
        ("k=kivi2,v=kivi2", "kivi2"),
        ("k=int4,v=int4", "int4"),
        ("k=exact,v=exact", "exact"),
        ("int4,residual=128,sinks=4,block=128", "int4"),
        ("sinks=0,int4", "int4,sinks=0"),
        ("exact,residual=32", "exact,residual=32"),
        ("int2,layers[ 0, 1 ]=k=fp8,v=int8", None),
        ("int2,layers[ 0, 1 ]=fp8 / int8", "int2,layers[0,1]=fp8/int8"),
        ("kivi2/kivi4", "k=int2-channel,v=int4-gs32"),
        ("int2,layers[0,-1]=kivi4", "int2,layers[0,-1]=kivi4"),
        ("kivi4,layers[-0]=exact", "kivi4,layers[0]=exact"),
    ],
)
def test_loose_spellings_have_one_canonical_form(loose: str, canonical: str | None) -> None:
    if canonical is None:
        with pytest.raises(ValueError, match=r"does not fit|unknown scheme"):  # a pair inside is A/B
            Scheme.parse(loose)
        return
    assert str(Scheme.parse(loose)) == canonical


def test_a_scheme_passes_through_and_other_types_do_not() -> None:
    scheme = Scheme.parse("kivi2")
    assert Scheme.parse(scheme) is scheme
    for wrong in (None, 4, ["int4"], Affine(4)):
        with pytest.raises(TypeError, match=r"a string such as 'int4' or a kvbits\.Scheme"):
            Scheme.parse(wrong)  # type: ignore[arg-type]


known = st.sampled_from([parse_codec(case.spelling) for case in CODECS])
sparse = st.builds(
    dataclasses.replace,
    st.sampled_from([parse_codec(case.spelling) for case in CODECS if case.entries]),
    outliers=st.floats(0, 0.1),
)
codecs = known | sparse
pairs = st.sampled_from([(entry.key, entry.value) for entry in CATALOGUE]) | st.tuples(codecs, codecs)


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    key, value = draw(codecs), draw(codecs)
    layers = draw(st.lists(st.integers(-40, 40), unique=True, max_size=6))
    cut = draw(st.integers(0, len(layers)))
    overrides = tuple(Override(tuple(part), *draw(pairs)) for part in (layers[:cut], layers[cut:]) if part)
    used = (key, value, *(codec for o in overrides for codec in (o.key, o.value)))
    blocks = [block for block in BLOCKS if all(block % codec.block_multiple == 0 for codec in used)]
    residual = st.integers(0, 4096)
    if key == value == Exact():
        residual = residual | st.none()
    pre_rope = draw(st.booleans()) and not any(codec.rotates for codec in (key, *(o.key for o in overrides)))
    sinks, block, centred = draw(st.integers(0, 64)), draw(st.sampled_from(blocks)), draw(st.booleans())
    return Scheme(key, value, draw(residual), sinks, block, overrides, pre_rope, centred)


@given(schemes())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_scheme_round_trips(scheme: Scheme) -> None:
    assert_round_trip(scheme)


WORDS = (
    "int4", "nuq3", "rot2", "lm4", "hqq4", "fp8", "exact", "kivi4", "int4-calibrated", "-static", "-channel", "-token",
    "-gs32", "-1%", "-0.5%", "-qnorm", ",", ",", ",", "k=", "v=", "/", "pre-rope", "post-rope", "centred", "uncentred",
    "outliers=1%", "outliers=2%", "qnorm", "residual=0", "sinks=1", "block=64", "layers[0]=", "layers[1,-1]=", " ",
)  # fmt: skip


@given(
    st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
    | st.text(alphabet="intfp0123456789-gs,=kvlayers[] residual", max_size=30)
)
@settings(max_examples=900, deadline=None, derandomize=True)
def test_any_text_is_a_scheme_or_a_value_error(text: str) -> None:
    try:
        scheme = Scheme.parse(text)
    except ValueError as error:
        assert str(error)
    else:
        assert_round_trip(scheme)


def test_rotated_values_may_go_with_keys_before_their_rotary_embedding() -> None:
    """It is keys that are turned by their positions."""
    scheme = Scheme.parse("k=int4-channel,v=rot4,pre-rope,layers[0]=int8/lm4")
    assert scheme.pre_rope and scheme.value == Rotated(4)


def test_aliases_stand_for_whole_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "best", "nuq3-1%,centred,sinks=1")
    assert str(Scheme.parse("best")) == "nuq3-1%,centred,sinks=1"
    assert str(Scheme.parse(" Best , residual = 64")) == "nuq3-1%,centred,residual=64,sinks=1"
    assert str(Scheme.parse("best,sinks=2,uncentred")) == "nuq3-1%,sinks=2"  # what is said wins over the alias
    with pytest.raises(ValueError, match="'sinks=3' does not fit"):
        Scheme.parse("best,sinks=2,sinks=3")
    with pytest.raises(ValueError, match="does not fit"):
        Scheme.parse("int4,best")  # only the first word
    for text in ("k=best,v=int4", "k=int4,v=best", "best/int4", "int4,layers[0]=best"):
        with pytest.raises(ValueError, match=r"'best' stands for a whole scheme, nuq3-1%,centred,sinks=1"):
            Scheme.parse(text)


def test_every_alias_is_a_scheme_and_no_other_name() -> None:
    for name, text in ALIASES.items():
        assert name == name.lower() and name not in BY_NAME
        scheme = Scheme.parse(name)
        assert scheme == Scheme.parse(text) == Scheme.parse(str(scheme))


def test_an_override_may_be_any_pair() -> None:
    scheme = Scheme(Affine(2), Affine(2), overrides=(Override((0,), Affine(8), Fp8()),))
    assert str(scheme) == "int2,layers[0]=int8/fp8"
    assert Scheme.parse(str(scheme)) == scheme


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int5", ("unknown scheme 'int5'", "int4", "int8")),
        ("kivi3", ("unknown scheme 'kivi3'", "near: kivi4, kivi2")),
        ("nf8", ("unknown scheme 'nf8'", "nf4")),
        ("hqq1", ("unknown scheme 'hqq1'", "hqq4")),
        ("fp8-gs32", ("unknown scheme 'fp8-gs32'", "-gs32", "int4-gs32")),
        ("fp8-statik", ("near: fp8-static",)),
        ("qqq", ("unknown scheme 'qqq'", "Known: default, small, exact, int8")),
        ("", ("unknown scheme ''", "Known: ")),
        ("int4,", ("'' does not fit",)),
        ("rot4,pre-rope", ("rot4 keys are rotated over head_dim, which does not commute", "use 'centred'")),
        ("k=lm4,v=int4,pre-rope", ("lm4 keys are rotated",)),
        ("nuq3,layers[0]=rot4", ("rot4 keys are rotated",)),
        ("lm4,outliers=1%", ("lm4 keeps no outliers beside its codes", "int8, nf4, nuq4-static, rot4")),
        ("lm4-1%", ("lm4 keeps no outliers beside its codes",)),
        ("fp8,outliers=0%", ("fp8 keeps no outliers",)),
        ("exact-1%", ("exact keeps no outliers",)),
        ("hqq4-1%", ("hqq4 keeps no outliers beside its codes",)),
        ("hqq4-gs32-1%", ("hqq has no outliers: its zero is found for all elements of a group",)),
        ("k=int4,v=fp8,outliers=1%", ("fp8 keeps no outliers",)),
        ("int4,qnorm", ("int4 has no fitted table to normalise; qnorm goes with nuq4-static",)),
        ("rot4-1%-qnorm", ("rot4 has no fitted table",)),
        ("int4-50%", ("outliers of 50% do not pay, at 32 bits each; give 0% to 10%",)),
        ("int4,outliers=10.1%", ("outliers of 10.1% do not pay",)),
        ("int4,outliers=1", ("outliers=1 is not a share", "outliers=1%")),
        ("int4,outliers=-1%", ("outliers=-1% is not a share",)),
        ("int4,outliers=", ("outliers= is not a share",)),
        ("int4-1%,outliers=2%", ("int4-1% names its outliers already: they cannot be 2% as well",)),
        ("int4-1%,outliers=0%", ("int4-1% names its outliers already",)),
        ("int4,outliers=1%,outliers=2%", ("'outliers=2%' does not fit", "once each", "outliers=P%")),
        ("int4,pre-rope,post-rope", ("'post-rope' does not fit", "says that already, or otherwise")),
        ("int4,centred,uncentred", ("'uncentred' does not fit", "something before it")),
        ("int4,centred,centred", ("'centred' does not fit", "something before it")),
        ("nuq3,qnorm,qnorm", ("'qnorm' does not fit",)),
        ("int4,prerope", ("did you mean pre-rope?",)),
        ("int4,centered", ("did you mean centred?",)),
        ("int4,outlier=1%", ("did you mean outliers=?",)),
        ("centred", ("name a scheme",)),
        ("nuq3-1", ("near: nuq3-1%",)),
        ("nuq3-channel-1", ("nuq3 is k=nuq3-static,v=nuq3-token: change its groups there",)),
        ("kivi4-gs64", ("kivi4 is k=int4-channel,v=int4-gs32: change its groups there",)),
        ("nuq4-calibrated", ("unknown scheme 'nuq4-calibrated'", "near: int4-calibrated")),
        ("int4-static-gs32", ("a static scale has no groups; leave out -gs32",)),
        ("hqq4-static", ("unknown scheme 'hqq4-static'", "all of these but hqq with -static", "-1%")),
        ("lm5", ("near: lm4, lm3, lm2",)),
        ("rot8", ("near: rot4, rot3, rot2",)),
        ("int4-gs48", ("int4 has no groups of 48", "(16, 32, 64, 128)")),
        ("int4-gs0", ("no groups of 0",)),
        ("nf4-channel-gs256", ("no groups of 256",)),
        ("int4,int8", ("'int8' does not fit", "k=...,v=...")),
        ("k=int4", ("'v=' is missing", "k=int4-channel,v=int4")),
        ("v=int4", ("'k=' is missing",)),
        ("k=int4,k=int8,v=int4", ("'k=int8' does not fit",)),
        ("k=int4,v=nope", ("unknown scheme 'nope'",)),
        ("residual=8", ("name a scheme",)),
        ("int4,residul=3", ("did you mean residual=?",)),
        ("int4,sink=3", ("did you mean sinks=?",)),
        ("int4,residual=3,residual=4", ("'residual=4' does not fit", "once each")),
        ("int4,residual=-1", ("residual=-1 is not a number of tokens", "residual=128")),
        ("int4,residual=1.5", ("residual=1.5 is not a number",)),
        ("int4,sinks=", ("sinks= is not a number",)),
        ("int4,sinks=many", ("sinks=many is not a number",)),
        ("int4,block=100", ("block=100 is not a block length", "(32, 64, 128, 256)")),
        ("int4-channel-gs128,block=64", ("int4-channel-gs128 needs blocks of a multiple of 128", "(128, 256)")),
        ("int4,block=32,layers[0]=nf4-channel-gs64", ("nf4-channel-gs64 needs", "(64, 128, 256)")),
        ("int4,layers[0]=nope", ("unknown scheme 'nope'",)),
        ("int4,layers[]=fp8", ("does not fit", "layers[0,1,-1]=NAME")),
        ("int4,layers[a]=fp8", ("does not fit",)),
        ("int4,layers=fp8", ("did you mean layers[0]=?",)),
        ("int4,layers[0]", ("does not fit",)),
        ("int4,layers[1]=fp8,layers[0,1]=nf4", ("layers [1] are named twice",)),
        ("int4,layers[2,2]=fp8", ("layers [2] are named twice",)),
    ],
)
def test_impossible_text_is_refused_with_what_is_near(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        Scheme.parse(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Affine(5), "int has no 5 bits; allowed are"),
        (lambda: NormalFloat(8), "nf has no 8 bits; allowed are"),
        (lambda: Affine(4, "row"), "per='row' is not a direction"),  # type: ignore[arg-type]
        (lambda: Affine(4, "token", 48), "int4 has no groups of 48"),
        (lambda: Scheme(Affine(4), Affine(4), residual=None), "residual=None keeps every token exact"),
        (lambda: Scheme(Exact(), Affine(4), residual=None), "residual=None keeps every token exact"),
        (lambda: Scheme(Affine(4), Affine(4), residual=-1), "residual=-1 is not a number of tokens"),
        (lambda: Scheme(Affine(4), Affine(4), sinks=-4), "sinks=-4 is not a number of tokens"),
        (lambda: Scheme(Affine(4), Affine(4), sinks=True), "sinks=True is not a number of tokens"),
        (lambda: Scheme(Affine(4), Affine(4), residual=1.5), "residual=1.5"),  # type: ignore[arg-type]
        (lambda: Scheme(Affine(4), Affine(4), block=0), "block=0 is not a block length"),
        (lambda: Scheme(Affine(4), Affine(4), block=96), "block=96 is not a block length"),
        (lambda: Scheme(Affine(4), Affine(4), pre_rope=1), "pre_rope=1 is neither True nor False"),  # type: ignore[arg-type]
        (lambda: Scheme(Affine(4), Affine(4), centred=None), "centred=None is neither"),  # type: ignore[arg-type]
        (lambda: Scheme(Rotated(4), Affine(4), pre_rope=True), "rot4 keys are rotated"),
        (lambda: Affine(4, outliers=0.2), "outliers of 20% do not pay"),
        (lambda: Affine(4, calibrated=True), "only static ones are calibrated"),
        (lambda: Rotated(8), "rot has no 8 bits"),
        (lambda: LloydMax(5), "lm has no 5 bits"),
        (lambda: Override((), Fp8(), Fp8()), "names no layers"),
        (lambda: Override((True,), Fp8(), Fp8()), "names no layers"),
        (lambda: Override([0], Fp8(), Fp8()), "names no layers"),  # type: ignore[arg-type]
    ],
)
def test_impossible_objects_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": 1}, "a scheme has the fields .*, not"),
        ({"key": "int7"}, "unknown scheme 'int7'"),
        ({"residual": "128"}, "residual='128' is not a number of tokens"),
        ({"residual": []}, r"residual=\[\] is not a number of tokens"),
        ({"residual": {}}, r"residual=\{\} is not a number of tokens"),
        ({"residual": False}, "residual=False is not a number of tokens"),
        ({"residual": 0.0}, "residual=0.0 is not a number of tokens"),
        ({"sinks": None}, "sinks=None is not a number of tokens"),
        ({"block": 128.0}, r"block=128.0 is not a block length; allowed are \(32, 64"),
        ({"pre_rope": 1}, "pre_rope=1 is neither True nor False"),
        ({"centred": "yes"}, "centred='yes' is neither"),
        ({"key": "rot4", "pre_rope": True}, "rot4 keys are rotated"),
        ({"block": [128]}, r"block=\[128\] is not a block length"),
        ({"key": 4}, "4 is not the name of a codec; give a string such as 'int4'"),
        ({"value": None}, "None is not the name of a codec"),
        ({"overrides": None}, "overrides=None is not a list"),
        ({"overrides": {"layers": [0]}}, "overrides=.* is not a list"),
        ({"overrides": [{}]}, r"an override has the fields \['key', 'layers', 'value'\], not \[\]"),
        ({"overrides": [None]}, r"an override has the fields .* got None"),
        ({"overrides": [{"layers": [0], "key": "int4"}]}, r"not \['key', 'layers'\]"),
        ({"overrides": [{"layers": [0], "key": "int4", "value": "int4", 5: 1}]}, r"an override has the fields"),
        ({"overrides": [{"layers": 0, "key": "int4", "value": "int4"}]}, "layers=0 names no layers"),
        ({"overrides": [{"layers": [0.0], "key": "int4", "value": "int4"}]}, "names no layers"),
    ],
    ids=str,
)
def test_json_of_another_type_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scheme.from_json({**Scheme.parse("int4").to_json(), **change})


def test_json_that_is_no_scheme_is_refused() -> None:
    data = Scheme.parse("int4").to_json()
    for wrong in (None, [], "int4", {name: data[name] for name in data if name != "key"}):
        with pytest.raises(ValueError, match="a scheme has the fields"):
            Scheme.from_json(wrong)  # type: ignore[arg-type]


# -- layers ------------------------------------------------------------------------------------------------------------


def names_by_layer(text: str, count: int) -> list[str]:
    return [str(Scheme.parse(text).for_layer(index, count)) for index in range(count)]


def test_overrides_count_from_both_ends() -> None:
    assert names_by_layer("int4,layers[0,-1]=fp8,layers[-2]=exact", 5) == ["fp8", "int4", "int4", "exact", "fp8"]
    assert names_by_layer("int4,layers[-3]=fp8", 3) == ["fp8", "int4", "int4"]
    assert names_by_layer("int4", 2) == ["int4", "int4"]


def test_a_layer_keeps_the_other_options_and_packs_where_its_codecs_do() -> None:
    scheme = Scheme.parse("int4,residual=32,sinks=1,block=64,layers[1]=kivi2").for_layer(1, 2)
    assert str(scheme) == "kivi2,residual=32,sinks=1,block=64" and scheme.overrides == ()
    assert not Scheme.parse("int4,residual=32,layers[0]=exact").for_layer(0, 2).packs
    packed = Scheme.parse("exact,layers[0]=int4")
    assert packed.for_layer(0, 2).residual == RESIDUAL_TOKENS and not packed.for_layer(1, 2).packs
    scheme = Scheme.parse("nuq3-1%,centred,layers[0]=int8")
    assert [str(scheme.for_layer(layer, 2)) for layer in (0, 1)] == ["int8,pre-rope,centred", "nuq3-1%,centred"]
    assert scheme.needs_calibration and not scheme.for_layer(0, 2).needs_calibration
    assert Scheme.parse("int4,layers[-1]=fp8-calibrated").needs_calibration


def test_layers_out_of_range_and_named_twice_are_refused() -> None:
    for layer, count in ((4, 4), (-5, 4), (30, 30), (1, 1)):
        scheme = Scheme.parse(f"int4,layers[{layer}]=fp8")
        for index in range(count):
            with pytest.raises(ValueError, match=rf"names layer {layer}, but the model has layers 0 to {count - 1}"):
                scheme.for_layer(index, count)
    scheme = Scheme.parse("int4,layers[3]=fp8,layers[-1]=nf4")
    assert str(scheme.for_layer(3, 8)) == "fp8"
    with pytest.raises(ValueError, match="layer 3 is named twice"):  # which is known once the count is
        scheme.for_layer(3, 4)


# -- frozen, catalogue -------------------------------------------------------------------------------------------------


def test_schemes_and_codecs_are_frozen() -> None:
    scheme = Scheme.parse("int4,layers[0]=fp8")
    parts = {"block": scheme, "bits": scheme.key, "layers": scheme.overrides[0], "name": CATALOGUE[0]}
    for field, thing in parts.items():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, 1)


def test_the_catalogue_and_the_table_name_the_same() -> None:
    assert {entry.name for entry in CATALOGUE} == {case.spelling for case in CATALOGUE_SCHEMES}
    assert len(BY_NAME) == len(CATALOGUE)
    for case in CATALOGUE_SCHEMES:
        entry = BY_NAME[case.spelling]
        assert (entry.key, entry.value) == (parse_codec(case.key.spelling), parse_codec(case.value.spelling))
        assert (entry.pre_rope, entry.centred) == (case.pre_rope, False)
        assert str(Scheme.parse(case.spelling)) == case.spelling  # a name prints as itself


def test_the_catalogue_is_complete_and_recommends_one_of_its_own() -> None:
    for entry in CATALOGUE:
        for text in (entry.name, entry.formula, entry.paper, entry.advice):
            assert text and text == text.strip(), entry.name
    assert {type(codec) for entry in CATALOGUE for codec in (entry.key, entry.value)} == set(CODEC_CLASSES)
    assert RECOMMENDED in ALIASES
    for kind in CODEC_CLASSES:
        for bits in getattr(kind, "allowed_bits", ()):
            assert f"{kind.name}{bits}" in BY_NAME  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("scheme", "window", "expected"),
    [
        ("int4", 4096, "int4"),
        ("int4", 1024, "int4"),
        ("int4", 512, "int4,block=64"),
        ("int4", 256, "int4,block=32"),
        ("int4", 128, "exact"),  # of which the residual is all
        ("kivi2", 1024, "kivi2"),
        ("kivi2", 256, "kivi2,block=32"),
        ("int8,residual=0,block=256", 512, "int8,residual=0,block=64"),
        ("k=int4-channel-gs128,v=int4", 512, "exact"),  # whose groups allow no shorter block
        ("exact", 64, "exact"),
        ("exact,residual=4,block=32", 16, "exact,residual=4,block=32"),
    ],
)
def test_a_scheme_for_a_window(scheme: str, window: int, expected: str) -> None:
    assert str(Scheme.parse(scheme).for_window(window)) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("int4", ["int4"]),
        ("exact, Int4 ,hf:quanto4,nuq3-1%", ["exact", "int4", "hf:quanto4", "nuq3-1%"]),
        ("kivi2,residual=64,sinks=4+8,lm4,centred,int4", ["kivi2,residual=64,sinks=4+8", "lm4,centred", "int4"]),
        ("k=int4-channel,v=int2,k=int8,v=int4,post-rope", ["k=int4-channel,v=int2", "k=int8,v=int4,post-rope"]),
        ("kivi2,layers[0,-1]=int8,int4", ["kivi2,layers[0,-1]=int8", "int4"]),
        ("int4;kivi2, residual=64", ["int4", "kivi2,residual=64"]),
    ],
)
def test_a_list_of_schemes_is_split(text: str, found: list[str]) -> None:
    assert split_schemes(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [("residual=64,int4", "no scheme stands before"), ("int4,,kivi2", "empty"), ("", "empty"), ("int4;", "empty")],
)
def test_a_list_with_a_stray_separator_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split_schemes(text)
