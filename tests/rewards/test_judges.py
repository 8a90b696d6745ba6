"""Judges behind a server of OpenAI's API, which fails in many ways."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quadriga.errors import ConfigError, RewardError
from quadriga.rewards import RewardManager, load_reward_function
from quadriga.rewards.judges import Judge, filled, json_field, judged, last_number, matched

KEY = "sk-judge-abcdefghijklmnopqrstuv"


class Server(ThreadingHTTPServer):
    """Answers each request with the next of `replies`, and then with the last: a status, the text
    of a verdict, None to hang until it closes, or bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[int | str | bytes | None] = ["7"]
        self.requests: list[tuple[str, str | None, dict]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        replies = self.server.replies
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if reply is None:
            self.server.closing.wait(60)
            return
        message = {"message": {"content": reply}}
        content = reply if isinstance(reply, bytes) else json.dumps({"choices": [message]}).encode()
        self.send_response(reply if isinstance(reply, int) else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr("quadriga.rewards.judges._PAUSE_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


def judge(server: Server, **more: object) -> Judge:
    return Judge(server.url, "m", "Rate {response} to {question}", key_env="JUDGE_KEY", **more)


def scored(judge: Judge, response: str = "r") -> float:
    return asyncio.run(judge.score(response=response, question="q"))


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (last_number, "I give 3. Rating: 8/10.", 8.0),
        (last_number, "-1.5", -1.5),
        (last_number, "version v2 is good", None),
        (matched(r"Score: (\S+)"), "Score: 1\nScore: 2", 2.0),
        (matched(r"Score: (\S+)"), "Score: good", None),
        (json_field("score"), '{"score": 1} so {"why": {}, "score": "0.5"}', 0.5),
        (json_field("good"), '```json\n{"good": true, "why": "{"}\n```', 1.0),
        (json_field("score"), '{"score": [1]} {"scor', None),
        (json_field("score"), "{" * 5000, None),
    ],
)
def test_a_verdict_is_read_from_what_a_judge_writes(read, text, expected):
    assert read(text) == expected


def test_a_prompt_is_filled_in_one_pass():
    found = filled('{"a": {response}} {question}', {"response": "{question}", "question": "?"})
    assert found == '{"a": {question}} ?'


@pytest.mark.parametrize(
    "more", [{"base_url": "file:///etc"}, {"prompt": "Rate it"}, {"attempts": 0}]
)
def test_a_judge_that_cannot_work_is_refused(more):
    with pytest.raises(ConfigError, match=r"of a judge must"):
        Judge(**{"base_url": "http://x/v1", "model": "m", "prompt": "{response}", **more})
    with pytest.raises(ConfigError, match="needs a group"):
        matched("Score")
    for names, words in (["score"], "cannot be called 'score'"), ([], "there is no judge"):
        one = Judge("http://x/v1", "m", "{response}")
        with pytest.raises(ConfigError, match=words):
            asyncio.run(judged(dict.fromkeys(names, one), response="r"))


@pytest.mark.parametrize("fault", [500, 429, b"not JSON", b'{"choices": []}'])
def test_a_judge_is_asked_again_after_a_fault_of_its_server(server, fault):
    server.replies = [fault, fault, "7"]
    assert scored(judge(server)) == 7.0
    path, key, body = server.requests[-1]
    assert (len(server.requests), path, key) == (3, "/v1/chat/completions", f"Bearer {KEY}")
    message = {"role": "user", "content": "Rate r to q"}
    assert body == {"temperature": 0.0, "model": "m", "messages": [message]}


@pytest.mark.parametrize(
    ("reply", "more", "words", "requests"),
    [
        (500, {}, "HTTP 500", 3),
        (401, {}, "HTTP 401", 1),
        (None, {"timeout_s": 0.2, "attempts": 2}, "no answer within 0.2 s", 2),
        ("no idea", {}, "no verdict can be read from 'no idea'", 1),
        ("NaN", {"verdict": float}, "no verdict can be read", 1),
    ],
)
def test_a_judge_without_a_verdict_is_one_line(server, reply, more, words, requests):
    server.replies = [reply]
    with pytest.raises(RewardError, match=words) as failed:
        scored(judge(server, **more))
    assert len(server.requests) == requests and KEY not in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_judge_without_its_key_or_its_server_says_so(server, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RewardError, match="variable JUDGE_KEY is not set"):
        scored(judge(server))
    away = Judge("http://127.0.0.1:9/v1", "m", "{response}", attempts=1)
    with pytest.raises(RewardError, match=r"127\.0\.0\.1:9/v1: URLError: .*refused"):
        scored(away)


def test_equal_prompts_are_asked_once(server):
    one = judge(server, cached=2)

    async def many() -> list[float]:
        return await asyncio.gather(*(one.score(response=r, question="q") for r in "aabab"))

    assert asyncio.run(many()) == [7.0] * 5 and len(server.requests) == 2
    assert asyncio.run(many()) == [7.0] * 5 and len(server.requests) == 2
    assert scored(one, "c") == 7.0 and len(server.requests) == 3
    asyncio.run(many())
    assert len(server.requests) == 4, "the oldest answer was dropped"


def test_several_judges_score_with_their_mean_and_their_agreement(server):
    def verdicts(*texts: str) -> dict[str, float]:
        judges = {}
        for name, text in zip("abc", texts, strict=True):
            judges[name] = Judge(
                server.url, name, "{response}", lambda _, own=text: last_number(own)
            )
        return asyncio.run(judged(judges, tolerance=1, response="r"))

    assert verdicts("1", "2", "9") == {
        "score": 4.0, "a": 1.0, "b": 2.0, "c": 9.0, "a/failed": 0.0, "b/failed": 0.0,
        "c/failed": 0.0, "agreement": 1 / 3,
    }  # fmt: skip
    found = verdicts("?", "2", "?")
    assert found == {"score": 2.0, "b": 2.0, "a/failed": 1.0, "b/failed": 0.0, "c/failed": 1.0}
    with pytest.raises(RewardError, match="judge a: no verdict"):
        verdicts("?", "?", "?")


def test_a_reward_file_with_judges_scores_a_batch(server, tmp_path):
    (tmp_path / "rule.py").write_text(f"""
from quadriga.rewards.judges import Judge, judged

KIND = Judge("{server.url}", "kind", "{{response}}", lambda text: len(text) % 3)
CLEAR = Judge("{server.url}", "clear", "{{response}}")

async def compute_score(response):
    if response == "alone":
        return await CLEAR.score(response=response)
    return await judged({{"kind": KIND, "clear": CLEAR}}, response=response)
""")
    server.replies = ["none"]
    manager = RewardManager(None, load_reward_function(tmp_path / "rule.py"), num_processes=1)
    outcomes = manager.score_texts(["a", "b", "alone"], [{}, {}, {}])
    manager.close()
    assert [(one.status, one.score) for one in outcomes] == [
        ("scored", 1.0), ("scored", 1.0), ("raised", 0.0),
    ]  # fmt: skip
    assert "judge clear: no verdict can be read from 'none'" in outcomes[2].detail
    assert manager.metrics["reward/raised"] == 1 and manager.metrics["reward/failed"] == 1 / 3
    assert manager.metrics["reward/extra/clear/failed"] == 1.0
