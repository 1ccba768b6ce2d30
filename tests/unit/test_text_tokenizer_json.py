"""Tokenizers from a model's folder, against transformers."""

from __future__ import annotations

import json
import random

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.errors import BadModelFile, ModelNotFound
from octavo.formats.gguf import read_gguf
from octavo.text.tokenizer import load_tokenizer
from tests.matrix import SEED
from tests.unit.text_samples import random_text


@pytest.fixture(scope="module")
def facts(smollm2_path) -> tuple[list[str], list[tuple[str, ...]]]:
    """The default model's tokens and merges."""
    metadata = read_gguf(smollm2_path).metadata
    return metadata["tokenizer.ggml.tokens"], [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]


def tokenizer_json(tokens, merges) -> dict:
    """A tokenizer.json as the default model's, written with the library's own parts."""
    encoder = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(tokens[:17])
    encoder.enable_truncation(5)
    return json.loads(encoder.to_str())


CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True, "normalized": False},
    "unk_token": "<|endoftext|>",
    "pad_token": None,
    "clean_up_tokenization_spaces": False,
}


@pytest.fixture(scope="module")
def document(facts) -> dict:
    """Its special tokens and single bytes only, which load fast."""
    return tokenizer_json([*facts[0][:17], *pre_tokenizers.ByteLevel.alphabet()], [])


@pytest.fixture
def folder(tmp_path, document):
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG), "utf-8")
    return tmp_path


def configure(folder, **changes):
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **changes}), "utf-8")


def test_as_transformers_and_as_the_gguf_file(folder, facts, smollm2_path):
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(*facts)), "utf-8")
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
    from_gguf = load_tokenizer(smollm2_path)
    rng = random.Random(SEED)
    specials = ["<|im_start|>", "<|im_end|>"]
    for _ in range(1000):
        text = random_text(rng, specials)
        ids = ours.encode(text)
        assert ids == theirs.encode(text) == from_gguf.encode(text), f"{text!r} (OCTAVO_SEED={SEED})"
        for skip in (False, True):
            said = ours.decode(ids, skip_special_tokens=skip)
            assert said == theirs.decode(ids, skip_special_tokens=skip), f"{text!r} (OCTAVO_SEED={SEED})"
    assert ours.bos_token == theirs.bos_token
    assert ours.eos_token_id == theirs.eos_token_id == 2
    assert ours.pad_token_id is None
    assert ours.special_ids == set(theirs.all_special_ids) | set(range(17))
    assert ours.vocab_size == len(theirs)


def test_either_the_folder_or_the_file(folder):
    assert load_tokenizer(folder / "tokenizer.json").encode("Hi") == load_tokenizer(folder).encode("Hi")


@pytest.mark.parametrize(
    ("post_processor", "settings", "framed"),
    [
        (False, {}, (False, False)),
        (True, {}, (True, False)),
        (True, {"add_bos_token": False}, (False, False)),
        (True, {"add_bos_token": True, "add_eos_token": True}, (True, True)),
        (False, {"add_bos_token": True}, (True, False)),
        (False, {"add_bos_token": None, "add_eos_token": True}, (False, True)),
    ],
)
def test_tokens_added_by_rule(folder, document, post_processor, settings, framed):
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    changed = {**document, "post_processor": template if post_processor else None}
    (folder / "tokenizer.json").write_text(json.dumps(changed), "utf-8")
    configure(folder, **settings)
    tokenizer = load_tokenizer(folder)
    bare = tokenizer.encode("Hello there", add_special_tokens=False)
    assert tokenizer.encode("Hello there") == [1] * framed[0] + bare + [2] * framed[1]


def test_where_chat_templates_stand(folder):
    assert load_tokenizer(folder).chat_template is None
    configure(folder, chat_template="one")
    assert load_tokenizer(folder).chat_template == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    configure(folder, chat_template=named)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("two", "tools")
    (folder / "chat_template.jinja").write_text("three")
    assert load_tokenizer(folder).chat_template == "three"


def test_special_tokens_that_only_the_settings_name(folder, document):
    plain = {**document, "added_tokens": [{**token, "special": False} for token in document["added_tokens"]]}
    (folder / "tokenizer.json").write_text(json.dumps(plain), "utf-8")
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).special_ids == set()
    named = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<repo_name>", {"content": "<file_sep>"}]}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": {"star": "<gh_stars>"}}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_ids == {2, 3, 5, 7}
    assert tokenizer.eos_token_id == 2


SENTENCEPIECE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}


@pytest.mark.parametrize("decoder", [SENTENCEPIECE, METASPACE], ids=["sentencepiece", "metaspace"])
def test_sentencepiece_decoders(tmp_path, decoder):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    vocab |= {text: 259 + i for i, text in enumerate(["▁", "h", "i", "hi", "▁hi"])}
    document = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": True, "normalized": False, "single_word": False, "lstrip": False,
             "rstrip": False}
            for i, text in enumerate(["<unk>", "<s>", "</s>"])
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None, "post_processor": None, "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": ["h i", "▁ hi"], "unk_token": "<unk>", "byte_fallback": True,
                  "fuse_unk": True},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    tokenizer = load_tokenizer(tmp_path)
    for text in ("hi hi", " hi", "hi 🐉é", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        if decoder is SENTENCEPIECE:
            assert tokenizer._encoder.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no tokenizer"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("\udcff", "cannot be read"),
        ('{"version": "1.0"}', "is no tokenizer"),
    ],
    ids=["cut off", "pointer", "bytes", "empty"],
)
def test_files_that_cannot_be_used(tmp_path, text, says):
    (tmp_path / "tokenizer.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadModelFile, match=says) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_decoder_that_cannot_be_streamed(folder, document):
    changed = {**document, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    (folder / "tokenizer.json").write_text(json.dumps(changed), "utf-8")
    with pytest.raises(BadModelFile, match="WordPiece"):
        load_tokenizer(folder)


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(ModelNotFound, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(BadModelFile, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(BadModelFile, match=r"tokenizer\.model but no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_settings_that_are_no_json(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadModelFile, match=r"tokenizer_config\.json is no JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize("id", [(1 << 32) - 1, random.Random(SEED).randrange(1 << 22, 1 << 32)])
def test_an_id_far_beyond_the_others_costs_no_memory(folder, document, id):
    """A list of that many entries would take gigabytes."""
    model = {**document["model"], "vocab": {**document["model"]["vocab"], "zzz": id}}
    (folder / "tokenizer.json").write_text(json.dumps({**document, "model": model}), "utf-8")
    with pytest.raises(BadModelFile, match=f"the id {id}; limit: .* for {len(model['vocab'])} tokens"):
        load_tokenizer(folder)
