"""Environments of Gymnasium, and tools of MCP servers.

    class Environment(GymnasiumEnvironment):
        id = "FrozenLake-v1"

    class Environment(ToolEnvironment):
        tools = [add, *mcp_tools(["python", "server.py"]), *mcp_tools("http://127.0.0.1:9000/mcp")]

A file of the user names one of them. Their packages are not dependencies of Quadriga; the extra
`agents` has Gymnasium and the SDK of MCP.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar

from quadriga.agents.environments import Action, Done, Observation
from quadriga.agents.tool_calls import Tool
from quadriga.containment import describe
from quadriga.errors import InputError

if TYPE_CHECKING:
    from mcp import Client

_LIST_S = 60.0  # deadline of the start of an MCP server, with the list of its tools


class GymnasiumEnvironment:
    """An environment of Gymnasium, one for each episode.

    Args:
        options: of `gymnasium.make`, in place of those of the class (`agent.options`).

    Attributes:
        id: its registered name.
        options: arguments of `gymnasium.make`.
        env: the environment, for `action` and `observation`.
        row: the columns of the data row.
    """

    id: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        import gymnasium

        gymnasium.spec(cls.id)  # a wrong name is an error before the run starts

    def __init__(self, **options: Any) -> None:
        import gymnasium

        self.env = gymnasium.make(self.id, **{**self.options, **options})

    def observation(self, observation: Any) -> str:
        """Return what the policy sees of an observation; "": the first one adds nothing."""
        return str(observation)

    def seed(self, row: Mapping[str, Any]) -> int:
        """Return the seed of an episode: the column `seed`, or a number made of all columns."""
        if (given := row.get("seed")) is not None:
            return int(given)
        return zlib.crc32(repr(sorted(row.items())).encode(errors="replace"))

    def action(self, text: str) -> Any:
        """Return the action of a turn: its text in a space of texts, otherwise its number. A
        `ValueError` is told to the policy, which acts again."""
        import gymnasium

        return text if isinstance(self.env.action_space, gymnasium.spaces.Text) else int(text)

    def reset(self, row: Mapping[str, object]) -> Observation | None:
        """Begin the episode of a data row."""
        self.row = row
        text = self.observation(self.env.reset(seed=self.seed(row))[0])
        return Observation(text) if text else None

    def step(self, action: Action) -> Observation | Done:
        """Act. The episode ends where the environment has terminated or truncated it."""
        try:
            chosen = self.action(action.text)
            if chosen not in self.env.action_space:
                raise ValueError(f"{chosen!r:.80} is not in {self.env.action_space}")
        except ValueError as error:
            return Observation(f"error: {error}", metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, _ = self.env.step(chosen)
        metrics = {"invalid_actions": 0.0}
        if terminated or truncated:
            return Done(float(reward), metrics)
        return Observation(self.observation(observation), float(reward), metrics)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


# Tools of MCP servers.


def mcp_tools(server: str | Sequence[str] | Callable[[], Client]) -> list[Tool]:
    """Return the tools of an MCP server, as its official SDK lists them.

    The server is asked for its tools when the file of the environment is imported. Each process
    that hosts environments opens a session of its own at the first call, and another one after a
    session has failed; its episodes share it.

    Args:
        server: a URL (streamable HTTP), the words of a command (stdio), or a function that returns
            an `mcp.Client`, for example one with headers.

    Raises:
        InputError: the server does not list its tools.
    """
    from mcp import Client, StdioServerParameters

    def client() -> Client:
        if callable(server):
            return server()
        if isinstance(server, str):
            return Client(server)
        return Client(StdioServerParameters(command=server[0], args=list(server[1:])))

    session = _Session(client)
    found: list[Tool] = []
    problems: list[BaseException] = []

    def listed() -> None:
        try:
            found.extend(asyncio.run(_listed(session)))
        except BaseException as error:  # raised below, in the thread that waits
            problems.append(error)

    thread = Thread(target=listed)  # an event loop may run in this thread
    thread.start()
    thread.join()
    if problems:
        name = server if isinstance(server, str) or callable(server) else " ".join(server)
        raise InputError(f"the MCP server {name} lists no tools: {_cause(problems[0])}")
    return found


async def _listed(session: _Session) -> list[Tool]:
    found, cursor = list[Tool](), None
    async with asyncio.timeout(_LIST_S), session.client() as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                schema = {"type": "function", "function": function}
                found.append(Tool(partial(session.call, tool.name), schema))
            if (cursor := page.next_cursor) is None:
                return found


class _Session:
    """A client of an MCP server that stays connected as long as an event loop runs.

    A client must be closed by the task that has opened it, so a task keeps it open.
    """

    def __init__(self, client: Callable[[], Client]) -> None:
        self.client = client
        self._open: tuple[asyncio.Task[None], asyncio.Future[Client]] | None = None

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool. Raises `RuntimeError` with what the server says, if the call has failed."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0].done() or self._open[1].get_loop() is not loop:
            connected: asyncio.Future[Client] = loop.create_future()
            self._open = asyncio.create_task(self._keep(connected)), connected
        keeper, connected = self._open
        client = await asyncio.shield(connected)
        try:
            found = await client.call_tool(tool, arguments)
        except MCPError as error:
            # The server has ended, or forgotten the session: the next call opens another one.
            if error.error.code in (CONNECTION_CLOSED, INVALID_REQUEST):
                keeper.cancel()
                self._open = None
            raise
        texts = [getattr(part, "text", f"[{part.type}]") for part in found.content]
        if found.is_error:
            raise RuntimeError("\n".join(texts))
        return "\n".join(texts)

    async def _keep(self, connected: asyncio.Future[Client]) -> None:
        try:
            async with self.client() as client:
                connected.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # raised by the calls that wait for the session
            if not connected.done():
                connected.set_exception(RuntimeError(_cause(error)))


def _cause(error: BaseException) -> str:
    """Describe an error, or the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe(error)
