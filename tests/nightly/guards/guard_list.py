"""The guards that `test_guards.py` takes out: the code, what replaces it, a test that must fail.

Listed are guards whose test shows that something does not happen: no process is left, no code runs,
no secret is written. Such a test can pass for another reason. One that expects the error of the
guard fails without it, and needs no entry.

`old` occurs exactly once in the file. `new` lets the program go on as if there were no guard.
"""

from dataclasses import dataclass

WEIGHTS = "tests/security/test_model_weights.py"
REWARDS = "tests/security/test_reward_containment.py"
SECRETS = "tests/security/test_secrets_masked.py"
EXITS = "tests/security/test_early_exits.py"
PATHS = "tests/security/test_input_paths.py"


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
        "config.json that chooses the attention",
        "models/loading.py",
        "config._attn_implementation = None if attention",
        "_ = None if attention",
        f"{WEIGHTS}::test_settings_choose_the_attention_and_config_json_does_not",
    ),
    Guard(
        "kernels that the library loads by itself",
        "models/loading.py",
        "code_of_hub = nullcontext() if settings.trust_remote_code else _no_code_of_the_hub()",
        "code_of_hub = nullcontext()",
        f"{WEIGHTS}::test_library_may_not_load_kernels_by_itself",
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
        "children that a reward function leaves",
        "containment.py",
        "                child.kill()\n",
        "                pass\n",
        f"{REWARDS}::test_close_ends_the_children_of_a_function[leave_a_session]",
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
        "containment.py",
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
        "with closing(self.ingredients), ExitStack() as stack:",
        "with ExitStack() as stack:",
        "tests/trainer/test_reward_processes.py::test_a_failed_run_ends_them",
    ),
    Guard(
        "values of variables in config.yaml",
        "config/loading.py",
        "                settings[name] = text\n",
        "                pass\n",
        f"{SECRETS}::test_values_of_variables_are_not_written",
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
        "tests/security/test_listening_sockets.py::test_ranks_on_ray_listen_on_loopback_only",
    ),
)
