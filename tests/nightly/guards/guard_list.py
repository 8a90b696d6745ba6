"""The guards of `remove_guards.py`: the code of each, what replaces it, and a test that must fail.

`old` occurs exactly once in the file. `new` lets the program go on as if there were no guard.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS = "tests/security/test_model_weights.py"
REWARDS = "tests/security/test_reward_containment.py"
DAMAGE = "tests/security/test_checkpoint_damage.py"
SECRETS = "tests/security/test_secrets_masked.py"
EXITS = "tests/security/test_early_exits.py"
PATHS = "tests/security/test_input_paths.py"
BATCHES = "tests/security/test_batch_files.py"


@dataclass(frozen=True)
class Guard:
    """One guard of the package.

    Attributes:
        name: what it prevents.
        file: the file of the guard, relative to `src/quadriga`.
        old: its code.
        new: the code without it.
        test: id of a test that fails without it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


GUARDS = (
    Guard(
        "pickled weights named in the index",
        "models/folder.py",
        r"""if not re.fullmatch(r"[\w][\w.\-]*\.safetensors", name):""",
        "if False:",
        f"{WEIGHTS}::test_pickle_named_in_the_index_runs_no_code",
    ),
    Guard(
        "keys of config.json that reach other loaders",
        "models/folder.py",
        "if source.get(key) is not None:",
        "if False:",
        f"{WEIGHTS}::test_keys_of_config_that_reach_other_loaders_are_refused",
    ),
    Guard(
        "config.json that chooses the attention",
        "models/loading.py",
        "config._attn_implementation = None if attn_implementation",
        "_ = None if attn_implementation",
        f"{WEIGHTS}::test_settings_choose_the_attention_and_config_json_does_not",
    ),
    Guard(
        "kernels of the hub without trust_remote_code",
        "models/loading.py",
        'if "/" in attn_implementation and not trust_remote_code:',
        "if False:",
        f"{WEIGHTS}::test_kernel_of_the_hub_needs_trust_remote_code",
    ),
    Guard(
        "kernels that the library loads by itself",
        "models/loading.py",
        "code_of_hub = nullcontext() if trust_remote_code else _no_code_of_the_hub()",
        "code_of_hub = nullcontext()",
        f"{WEIGHTS}::test_library_may_not_load_kernels_by_itself",
    ),
    Guard(
        "weights that are not finite",
        "models/weights.py",
        " for name, count in counts.items() if count.nan or count.infinite}\n",
        " for name, count in counts.items() if False}\n",
        f"{WEIGHTS}::test_weights_that_are_not_finite_are_named",
    ),
    Guard(
        "links to nothing in a model folder",
        "models/folder.py",
        "    _check_entries(folder)\n",
        "",
        f"{PATHS}::test_a_file_of_a_model_folder_that_is_no_file_is_refused"
        "[generation_config.json-dangling]",
    ),
    Guard(
        "changed bytes in a checkpoint",
        "checkpoint/folders.py",
        "if digest != file.digest:",
        "if False:",
        f"{DAMAGE}::test_damage_is_named_and_the_checkpoint_before_is_used[flip_a_bit]",
    ),
    Guard(
        "a changed marker of a checkpoint",
        "checkpoint/folders.py",
        "if digest != digest_json(marker):",
        "if False:",
        f"{DAMAGE}::test_damage_is_named_and_the_checkpoint_before_is_used[alter_the_step]",
    ),
    Guard(
        "links in a checkpoint",
        "checkpoint/files.py",
        "mode = path.lstat().st_mode",
        "mode = path.stat().st_mode",
        f"{DAMAGE}::test_damage_is_named_and_the_checkpoint_before_is_used"
        "[link_in_place_of_a_file]",
    ),
    Guard(
        "shards of another step or rank",
        "checkpoint/shards.py",
        "if found != expected:",
        "if False:",
        f"{DAMAGE}::test_the_files_of_another_step_or_rank_are_refused_by_each_rank",
    ),
    Guard(
        "a score for another sample",
        "rewards/pool.py",
        "if (report.sample, report.process) != (self.number, self.process):",
        "if False:",
        f"{REWARDS}::test_a_report_with_another_sample_or_process_is_refused",
    ),
    Guard(
        "children that a reward function leaves",
        "rewards/pool_worker.py",
        "                child.kill()\n",
        "                pass\n",
        f"{REWARDS}::test_close_ends_the_children_of_a_function[leave_a_session]",
    ),
    Guard(
        "memory of a reward function",
        "rewards/pool_worker.py",
        "    limit_memory(megabytes)\n",
        "",
        f"{REWARDS}::test_memory_beyond_the_limit_fails_only_its_sample[allocate]",
    ),
    Guard(
        "a reward function that ends the controller",
        "rewards/manager.py",
        "with contained():",
        "if True:",
        f"{REWARDS}::test_a_function_cannot_end_the_controller[0]",
    ),
    Guard(
        "a user file that ends the controller",
        "algorithms/user_files.py",
        "with contained():",
        "if True:",
        f"{EXITS}::test_a_command_that_imports_the_file_has_code_2",
    ),
    Guard(
        "os._exit(0) in a run",
        "cli/main.py",
        "    guard.install()\n",
        "",
        f"{EXITS}::test_a_run_that_code_of_the_user_ends_does_not_exit_with_0",
    ),
    Guard(
        "sys.exit(0) in a run",
        "cli/main.py",
        "if invocation is None:",
        "if True:",
        f"{EXITS}::test_a_run_that_code_of_the_user_ends_does_not_exit_with_0[sys.exit]",
    ),
    Guard(
        "a closed connection of the user",
        "cli/main.py",
        "if isinstance(error, BrokenPipeError) and _output_has_no_reader():",
        "if isinstance(error, BrokenPipeError):",
        f"{EXITS}::test_a_closed_connection_of_the_user_is_not_success",
    ),
    Guard(
        "the connection in a copy of a reward process",
        "rewards/pool_worker.py",
        "    os.register_at_fork(after_in_child=connection.close)\n",
        "",
        f"{REWARDS}::test_a_copy_of_the_process_does_not_hold_the_connection",
    ),
    Guard(
        "reward processes after a failed run",
        "trainer/ppo.py",
        "with closing(self.ingredients):",
        "if True:",
        "tests/trainer/test_reward_processes.py::test_a_failed_run_ends_them",
    ),
    Guard(
        "secrets in messages of the command line",
        "cli/main.py",
        "print(mask_secrets(text), file=sys.stderr)",
        "print(text, file=sys.stderr)",
        f"{SECRETS}::test_errors_of_the_command_line_are_masked",
    ),
    Guard(
        "values of variables in config.yaml",
        "config/writing.py",
        "                OmegaConf.update(written, key, text)\n",
        "                pass\n",
        f"{SECRETS}::test_values_of_variables_are_not_written",
    ),
    Guard(
        "deep JSON lines",
        "data/rows.py",
        "and _depth(values) > MAX_DEPTH:",
        "and False:",
        "tests/security/test_bounded_data.py::test_a_json_line_is_refused_with_its_file_and_row"
        "[nested below the limit of Python]",
    ),
    Guard(
        "large settings files",
        "config/reading.py",
        "if len(data) > MAX_FILE:",
        "if False:",
        "tests/security/test_bounded_settings.py::test_a_settings_file_is_refused_in_one_line"
        "[a large file]",
    ),
    Guard(
        "two runs in one folder",
        "observability/run_folder.py",
        "if owner is not None and owner.is_alive(age_s):",
        "if False:",
        "tests/observability/test_run_lock.py::test_a_second_run_in_a_folder_is_refused",
    ),
    Guard(
        "a pipe in place of the lock",
        "observability/run_folder.py",
        "os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC",
        "os.O_NOFOLLOW | os.O_CLOEXEC",
        "tests/observability/test_run_lock.py"
        "::test_what_is_no_file_in_place_of_a_file_of_the_run_is_not_read[run.lock-pipe]",
    ),
    Guard(
        "a token of Ray that all users can read",
        "backends/ray/cluster.py",
        "        protect_token()\n",
        "",
        "tests/security/test_ray_token.py::test_a_new_token_is_written_into_a_private_file",
    ),
    Guard(
        "sockets of ranks on other addresses",
        "parallel/distributed.py",
        "_LOOPBACK if one_node else os.environ",
        "os.environ",
        "tests/security/test_listening_sockets.py::test_ranks_of_one_node_listen_on_loopback_only",
    ),
    Guard(
        "digest of a batch file",
        "protocol/disk.py",
        "if data[end:] != hashlib.sha256(memoryview(data)[:end]).digest():",
        "if False:",
        f"{BATCHES}::test_every_flipped_byte_is_found",
    ),
    Guard(
        "offsets in the header of a batch file",
        "protocol/disk.py",
        "!= [at - begin, stop - begin]:",
        "== None:",
        f"{BATCHES}::test_a_forged_header_is_refused[an overlap]",
    ),
    Guard(
        "entries of a batch file that are read twice",
        "protocol/disk.py",
        "self._entries.pop(name)",
        "self._entries[name]",
        f"{BATCHES}::test_an_entry_is_read_once",
    ),
    Guard(
        "booleans of a batch file",
        "protocol/disk.py",
        'if dtype == "BOOL" and data.numel()',
        "if False and data.numel()",
        f"{BATCHES}::test_a_forged_structure_is_refused[booleans of other bytes]",
    ),
    Guard(
        "rows of a jagged tensor in a batch file",
        "protocol/disk.py",
        "if not ends or bool((offsets.diff() < 0).any()):",
        "if False:",
        f"{BATCHES}::test_forged_offsets_of_rows_are_refused",
    ),
)
