"""An export has the tokenizer that the run accepted, in whichever files it was."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import ModelError
from quadriga.models import check_model_folder, load_tokenizer, write_tiny_model

TEXTS = ["How many apples are 3 and 4? There are 7 apples.", "Ünder <|endoftext|> the tree"]


def byte_pairs() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def write_gpt2(folder):
    """A folder as of GPT-2: the tokenizer is in vocab.json and merges.txt alone."""
    tokenizer = byte_pairs()
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_embd=8, n_layer=1, n_head=2, n_positions=32,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.model.save(str(folder))
    return folder


def write_llama(folder):
    write_tiny_model(folder, TEXTS)
    return folder


def ids(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def test_an_export_of_the_engine_is_accepted_as_its_model_was(tmp_path):
    source = write_gpt2(tmp_path / "source")
    check_model_folder(source)
    engine = FSDPEngine(ModelConfig(path=str(source)), EngineConfig())
    engine.save_hf(tmp_path / "out")
    check_model_folder(tmp_path / "out")
    assert ids(tmp_path / "out") == ids(source)
    again = load_tokenizer(tmp_path / "out")
    assert again.eos_token_id == load_tokenizer(source).eos_token_id == 0


def test_a_tokenizer_that_was_deleted_or_damaged_during_the_run_is_an_error(tmp_path):
    source = write_llama(tmp_path / "source")
    engine = FSDPEngine(ModelConfig(path=str(source)), EngineConfig())
    engine.save_hf(tmp_path / "out")
    before = ids(tmp_path / "out")
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"the tokenizer in .*source cannot be loaded"):
        engine.save_hf(tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    with pytest.raises(ModelError, match=r"source has no tokenizer, .*tokenizer\.json.*vocab\.txt"):
        engine.save_hf(tmp_path / "out")
    assert ids(tmp_path / "out") == before, "the export of before is complete"


def test_the_folder_of_the_megatron_engine_exports_it_too(tmp_path):
    pytest.importorskip("megatron.core")
    from quadriga.engines.base import in_local_folders
    from quadriga.engines.megatron.weights import FolderModel

    source = write_llama(tmp_path / "source")
    folder = FolderModel(in_local_folders(ModelConfig(path=str(source))), "lm", trained=False)
    zeros = ((name, torch.zeros(w.shape)) for name, w in folder.weights.items())
    folder.export(tmp_path / "out", zeros)
    assert ids(tmp_path / "out") == ids(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    with pytest.raises(ModelError, match="source has no tokenizer"):
        folder.export(tmp_path / "out", iter(()))
