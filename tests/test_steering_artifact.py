import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ster.errors import ArtifactError, FileError, InputError, LayerError
from ster.steering_artifact import LayerVector, SteeringArtifact, compare

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]))


def make(**fields):
    rows = fields.pop("rows", {1: [0.5, -0.25], 2: [0.0, 1.0]})
    vectors = tuple(LayerVector(layer, np.array(row, np.float32), 0.5, 0.875) for layer, row in rows.items())
    return SteeringArtifact(**{"model": "toy-llama", "method": "caa", "hidden_size": 2, "vectors": vectors, **fields})


def same(a, b):
    return a.header() == b.header() and all(
        x.values.dtype == y.values.dtype == np.float32 and x.values.tobytes() == y.values.tobytes()
        for x, y in zip(a.vectors, b.vectors, strict=True)
    )


@st.composite
def artifacts(draw):
    hidden = draw(st.integers(1, 5))
    chosen = sorted(draw(st.sets(st.integers(0, 99), min_size=1, max_size=3)))
    scores = st.none() | st.floats(allow_nan=False, allow_infinity=False)
    return SteeringArtifact(
        model=draw(text),
        method=draw(text),
        hidden_size=hidden,
        vectors=tuple(LayerVector(n, draw(hnp.arrays(np.float32, hidden, elements=finite)), draw(scores), draw(scores)) for n in chosen),
        trait_name=draw(st.none() | text),
        model_revision=draw(st.none() | text),
        metadata=draw(st.dictionaries(text, text, max_size=3)),
        precision=draw(st.none() | text),
        chat_template=draw(st.none() | text),
    )


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "a.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return write


def document(**changes):
    return {**json.loads(make().to_json()), **changes}


# Round trips


@given(artifacts())
def test_an_artifact_reads_back_to_the_bit(tmp_path_factory, artifact):
    path = tmp_path_factory.mktemp("a") / "a.json"
    artifact.save(path)
    loaded = SteeringArtifact.load(path)
    assert same(loaded, artifact) and loaded.to_json() == artifact.to_json()


@given(st.integers(0, 2**32 - 1))
def test_every_float32_survives_its_shortest_decimal(bits):
    values = np.array([bits], np.uint32).view(np.float32)
    if np.isfinite(values[0]):
        assert (
            SteeringArtifact.from_dict(json.loads(make(hidden_size=1, rows={0: values}).to_json())).vectors[0].values.tobytes()
            == values.tobytes()
        )


def test_the_document_has_its_keys_in_order():
    artifact = make(trait_name="calm", precision="f32", metadata={"k": '"vectors":null'})
    assert artifact.to_json().decode() == (
        '{"schema_version":1,"product":"ster","model":"toy-llama","model_revision":null,"trait_name":"calm","method":"caa","hidden_size":2,'
        '"vectors":[\n{"layer":1,"values":[0.5,-0.25],"train_margin":0.5,"train_accuracy":0.875},\n'
        '{"layer":2,"values":[0.0,1.0],"train_margin":0.5,"train_accuracy":0.875}\n],'
        '"metadata":{"k":"\\"vectors\\":null"},"precision":"f32","chat_template":null}\n'
    )


def test_fields_a_first_schema_file_may_lack(file):
    shorter = {k: v for k, v in document().items() if k not in ("metadata", "precision", "chat_template")}
    loaded = SteeringArtifact.load(file(b"\xef\xbb\xbf" + json.dumps(shorter).encode()))
    assert (loaded.metadata, loaded.precision, loaded.chat_template) == ({}, None, None)


# Refusals


VECTOR = {"layer": 1, "values": [0.5, -0.25], "train_margin": 0.5, "train_accuracy": 0.875}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schema_version": 2}, "artifact schema 2 is unsupported; this Ster build reads schema 1"),
        ({"schema_version": True}, "artifact schema true is unsupported; this Ster build reads schema 1"),
        ({"schema_version": 1.0}, "artifact schema 1.0 is unsupported; this Ster build reads schema 1"),
        ({"schema_version": 2, "product": "x", "new": 1}, "artifact schema 2 is unsupported; this Ster build reads schema 1"),
        ({"product": "other"}, 'artifact belongs to product "other", not Ster'),
        ({"vectors": []}, "artifact has no steering vectors"),
        ({"hidden_size": 3}, "layer 1 has vector width 2, expected 3"),
        ({"vectors": [{**VECTOR, "values": [1e39, 0]}]}, "layer 1 contains a non-finite value"),
        ({"vectors": [{**VECTOR, "values": [10**400, 0]}]}, "layer 1 contains a non-finite value"),
        ({"vectors": [VECTOR, VECTOR]}, "layer 1 has two vectors"),
        ({"vectors": [{**VECTOR, "layer": 2}, VECTOR]}, "layers must be in ascending order, found 1 after 2"),
        ({"hidden_size": 0}, "`hidden_size` must be a whole number above zero, found 0"),
        ({"hidden_size": 2.0}, "`hidden_size` must be a whole number above zero, found 2.0"),
        ({"vectors": [{**VECTOR, "layer": -1}]}, "`layer` must be a whole number, zero or more, found -1"),
        ({"vectors": [{**VECTOR, "train_margin": "x"}]}, "`train_margin` of layer 1 must be a finite number or null, found x"),
        ({"vectors": [{**VECTOR, "train_accuracy": 10**400}]}, "`train_accuracy` of layer 1 must be a finite number or null, found 1"),
        ({"model": None}, "`model` must be a string, found null"),
        ({"trait_name": 7}, "`trait_name` must be a string or null, found a number"),
        ({"metadata": {"a": 1}}, "`metadata` must map strings to strings, found a number at `a`"),
    ],
)
def test_a_broken_rule_is_refused(file, changes, sentence):
    with pytest.raises(ArtifactError) as caught:
        SteeringArtifact.load(file(document(**changes)))
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "line 1"),
        (b"[]", "expected an object, found a list"),
        (b"{}", "a steering artifact has no `schema_version`"),
        (document(extra=1), "unknown key `extra`"),
        ({k: v for k, v in document().items() if k != "method"}, "has no `method`"),
        (document(vectors={}), "`vectors` must be a list, found an object"),
        (document(vectors=[7]), "a vector must be an object, found a number"),
        (document(vectors=[{**VECTOR, "values": "AAAA"}]), "`values` must be a list, found a string"),
        (document(vectors=[{**VECTOR, "values": [0, None]}]), "`values` must be numbers, found null"),
        (document(vectors=[{**VECTOR, "values": [0, True]}]), "`values` must be numbers, found a boolean"),
        (document(vectors=[{"layer": 1, "values": [0, 1]}]), "has no `train_margin`"),
        (document(metadata=[]), "`metadata` must be an object, found a list"),
        (b'{"schema_version": 1, "schema_version": 1}', "appears twice"),
    ],
)
def test_a_malformed_document_is_refused(file, content, why):
    path = file(content)
    with pytest.raises(ArtifactError) as caught:
        SteeringArtifact.load(path)
    assert str(caught.value).startswith(f"invalid steering artifact JSON in {path}") and why in str(caught.value)


def test_nan_is_refused_wherever_it_comes_from(file):
    with pytest.raises(ArtifactError, match="layer 1 contains a non-finite value"):
        SteeringArtifact.load(file(make().to_json().replace(b"-0.25", b"NaN")))
    with pytest.raises(ArtifactError, match="layer 0 contains a non-finite value"):
        make(rows={0: [np.inf, 0]})
    with pytest.raises(ArtifactError, match="half a surrogate pair"):
        make(trait_name="\ud800")
    with pytest.raises(ArtifactError, match="must be float32, found float64"):
        make(vectors=(LayerVector(0, np.zeros(2)),))
    with pytest.raises(FileError, match="^failed to read steering artifact"):
        SteeringArtifact.load(file(b"").parent / "missing")


# Against a model


def test_the_model_is_known_by_its_weights_then_by_its_name():
    plain, hashed = make(), make(metadata={"weights_hash": "aa"})
    assert plain.check_model("toy-llama", 2, 3) == []
    assert hashed.check_model("renamed", 2, 3, weights_hash="aa") == []
    for artifact, options in ((plain, {}), (plain, {"weights_hash": "aa"}), (hashed, {}), (hashed, {"weights_hash": "bb"})):
        with pytest.raises(ArtifactError) as caught:
            artifact.check_model("other", 2, 3, **options)
        assert str(caught.value) == 'artifact was trained for model "toy-llama", current model is "other"'
    with pytest.raises(ArtifactError, match='current model is "toy-llama"') as caught:
        hashed.check_model("toy-llama", 2, 3, weights_hash="bb")
    assert str(caught.value.hint).startswith("the weights differ; `ster vector convert FILE OUT --any-model`")
    assert make(model="").check_model("any", 2, 3) == ["the artifact does not say which model it was trained for"]


def test_width_and_layers_must_be_the_models():
    with pytest.raises(ArtifactError) as caught:
        make().check_model("toy-llama", 64, 3)
    assert str(caught.value) == "artifact width 2 does not match model width 64"
    with pytest.raises(LayerError) as caught:
        make().check_model("toy-llama", 2, 2)
    assert str(caught.value) == "layer 2 is outside the model's 0..1 range"


def test_what_may_matter_is_warned_of():
    artifact = make(precision="f32", chat_template="off", model_revision="abc", metadata={"tokenizer_hash": "t"})
    model = {"precision": "bf16", "chat_template": "applied", "model_revision": "def", "tokenizer_hash": "u"}
    assert artifact.check_model("toy-llama", 2, 3, **model) == [
        "the artifact was trained at revision abc, the model is at def",
        "the model's tokenizer is not the one the artifact was trained with",
        "the artifact was trained at precision f32, the model runs at bf16",
        "the artifact was trained with chat template off, the model runs with applied",
    ]
    assert artifact.check_model("toy-llama", 2, 3, precision="f32", chat_template="off") == []
    assert artifact.check_model("toy-llama", 2, 3, chat_template="absent") == []  # raw text, as with `off`


# Summary and comparison


def test_the_summary_has_norms_for_values():
    rows = make(rows={4: [3.0, -4.0]}).summary()["vectors"]
    assert rows == [{"layer": 4, "norm": 5.0, "largest": {"coordinate": 1, "value": -4.0}, "train_margin": 0.5, "train_accuracy": 0.875}]
    with pytest.raises(LayerError, match="no vector for layer 7"):
        make().vector(7)


def test_a_sum_is_explained_by_its_parts():
    a, b, both = (make(hidden_size=4, rows={1: row}) for row in ([1, 0, 0, 0], [0, 2, 0, 0], [3, 4, 0, 0]))
    (layer,) = compare([a, b, both], ["a", "b", "both"]).layers
    assert np.allclose(layer.cosine, [[1, 0, 0.6], [0, 1, 0.8], [0.6, 0.8, 1]])
    assert layer.explained == pytest.approx((1.0, 1.0, 1.0)) and layer.weights[2] == pytest.approx((0.6, 0.8, 0.0))
    (layer,) = compare([a, both]).layers
    assert layer.explained == pytest.approx((0.36, 0.36)) and layer.by_chance == 0.25


def test_only_layers_in_common_are_compared():
    first, second = make(rows={1: [1, 0], 2: [0, 0]}), make(rows={2: [1, 1], 3: [1, 0]}, model="other", method="pca")
    found = compare([first, second])
    assert [layer.layer for layer in found.layers] == [2]
    assert found.layers[0].explained == pytest.approx((0.0, 0.0)) and found.layers[0].cosine[0] == (0.0, 0.0)
    assert found.notes == ("the artifacts come from several models: other, toy-llama", "the artifacts come from several methods: caa, pca")
    json.dumps(found.to_dict(), allow_nan=False)
    with pytest.raises(InputError, match="no layer in common"):
        compare([make(rows={1: [1, 0]}), make(rows={2: [1, 0]})])
    with pytest.raises(InputError, match="at least two"):
        compare([first])
    with pytest.raises(ArtifactError, match="artifact width 3 does not match artifact width 2"):
        compare([first, make(hidden_size=3, rows={1: [1, 0, 0]})])
