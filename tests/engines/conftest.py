"""A Llama model with a few ten thousand parameters, shared by the tests of this folder."""

from dataclasses import replace

import engine_cases as cases
import pytest
import torch
from gradient_cases import Folders
from transformers import GPT2Config, GPT2LMHeadModel

from quadriga.models.tiny import write_tiny_model
from rank_groups import fork_ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, ["one two three"], cases.MODEL_SHAPE)
    return str(folder)


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """A GPT-2, which computes all in the dtype of its parameters."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def folders(model_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    write_tiny_model(
        root / "tied", ["one two three"], replace(cases.MODEL_SHAPE, tie_word_embeddings=True)
    )
    write_tiny_model(root / "reference", ["one two three"], cases.MODEL_SHAPE, seed=1)
    return Folders(model_folder, str(root / "tied"), str(root / "reference"))


@pytest.fixture(scope="session")
def work(model_folder, folders, tmp_path_factory):
    """A folder with a checkpoint after one step (`one_rank`) and the results of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    engine = cases.trainable(model_folder)
    cases.step(engine)
    engine.save(folder / "one_rank")
    fork_ranks(cases.rank_main, 2, folders, str(folder), limit=170)
    return folder


@pytest.fixture(scope="session")
def two_ranks(work):
    # The file was written by `rank_main`; its keys are dataclasses, which need pickle.
    return torch.load(work / "results.pt", weights_only=False)
