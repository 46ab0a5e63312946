"""Routing from a running vLLM or SGLang that returns routed experts, through its HTTP interface.

Only expert ids are available: no weights, no logits. The importers of the server's format read the answers.
"""

import http.client
import json
import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line
from moetool.models.checkpoint import Checkpoint
from moetool.models.config_model import ConfigModel
from moetool.models.shape import shape_of
from moetool.prompts.gather import Prompt
from moetool.trace.foreign.importing import Imported, import_trace

ENGINES = ("vllm", "sglang")
_FLAG = "--enable-return-routed-experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteServer:
    """A remote server.

    Attributes:
        url: URL without a path, e.g. http://127.0.0.1:8000.
    """

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0
    concurrency: int = 1

    def __post_init__(self) -> None:
        match = re.match(r"https?://(\[[^]/]+\]|[^][/]+)(:\d+)?(/|$)", self.url)
        try:
            is_address = match is not None and (urllib.parse.urlsplit(self.url).hostname or "").encode("idna")
        except UnicodeError:  # an empty part of a name
            is_address = False
        if not is_address:
            raise UsageError(f"--server {self.url!r}: expected an address such as http://127.0.0.1:8000")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return its JSON answer.

        Raises:
            MoetoolError: the server cannot be reached, refuses, or does not answer JSON.
        """
        address = self.url.rstrip("/") + path
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(address, data=data, headers=headers)
            with self._opener().open(request, timeout=self.timeout_s) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            reply = error.read(300).decode(errors="replace").replace("\n", " ")
            raise MoetoolError(f"{address} answers {error.code} ({reply or error.reason})") from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: not in Latin-1
            raise MoetoolError(f"{address} does not answer ({first_line(error)}); is the server running?") from None
        try:
            return json.loads(content)
        except ValueError:
            raise MoetoolError(f"{address} answers no JSON; give the address of an engine's server") from None

    def _opener(self) -> urllib.request.OpenerDirector:
        """The environment's proxies do not know addresses of this machine."""
        host = urllib.parse.urlsplit(self.url).hostname or ""
        own = host == "localhost" or host.startswith("127.") or host == "::1"
        return urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * own)

    def engine(self) -> str:
        """Return `sglang` if the server has SGLang's own routes, else `vllm`."""
        for path in ("/model_info", "/get_model_info"):
            try:
                if "model_path" in self.ask(path):
                    return "sglang"
            except MoetoolError:
                continue
        return "vllm"


def capture_remote(
    server: RemoteServer,
    checkpoint: Checkpoint | ConfigModel,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_new_tokens: int = 32,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Imported:
    """Send prompts for greedy decoding, and write the server's routing as a trace.

    Args:
        checkpoint: the server's model, for its layers with experts and its tokenizer; without weights is enough.
            Prompts are sent as tokens, as in a local capture.

    Raises:
        MoetoolError: the server cannot be reached, or refuses.
        UsageError: the server returns no routed experts, or `out` exists.
        MismatchError: the answer is of another model, or a prompt has a token that the model does not embed.
    """
    engine = server.engine()
    name = "" if engine == "sglang" else _served(server)
    sizes = [prompt.token_ids(checkpoint.tokenizer, checkpoint.vocab_size, prompt.input_tokens) for prompt in prompts]

    def ask(place: int) -> dict[str, Any]:
        prompt, ids = prompts[place], sizes[place]
        if engine == "sglang":
            sampling = {"max_new_tokens": max_new_tokens, "temperature": 0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_routed_experts": True}
            response = server.ask("/generate", body)
            holder = response.get("meta_info", {}) if isinstance(response, dict) else {}
        else:
            body = {
                "model": name,
                "prompt": ids,
                "max_tokens": max_new_tokens,
                "temperature": 0,
                "return_token_ids": True,
                "return_routed_experts": True,
            }
            response = server.ask("/v1/completions", body)
            holder = (response.get("choices") or [{}])[0] if isinstance(response, dict) else {}
        if not isinstance(holder, dict) or holder.get("routed_experts") is None:
            raise UsageError(f"{server.url} returns no routed experts; start {engine} with {_FLAG}")
        if engine == "sglang":
            holder["id"] = prompt.prompt_id
        else:
            response["id"] = prompt.prompt_id
        return dict(response)

    answers: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=server.concurrency) as pool:
        for done, (prompt, response) in enumerate(zip(prompts, pool.map(ask, range(len(prompts))), strict=True), 1):
            task = prompt.task if prompt.task == prompt.dataset else f"{prompt.dataset} {prompt.task}"
            answers.setdefault(re.sub(r"[^\w. -]+", "_", task), []).append(json.dumps(response))
            on_progress(done)
        files = []
        for task, lines in answers.items():
            files.append(Path(folder) / f"{task}.jsonl")
            files[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
        settings = {"model": str(checkpoint.path)}
        name = f"{engine}_routed_experts"
        try:
            return import_trace(files, name, out, settings=settings, find_model=shape_of, overwrite=overwrite)
        except MismatchError as error:  # in terms of files that are gone
            fault, _, advice = _of_answers(str(error), files).partition("; ")
            if advice.startswith("name the ") or advice.endswith(" of another model"):  # by options of an import
                advice = f"MODEL must be the one that the server runs, found {checkpoint.path}"
            raise MismatchError("; ".join(filter(None, (f"{server.url}: {fault}", advice)))) from None


def _of_answers(message: str, files: Sequence[Path]) -> str:
    """Return a message about these files, and lines in them, in terms of the answers that they hold."""
    for file in files:
        message = re.sub(rf"(['\"]?){re.escape(str(file))}\1(, \w+ \d+)?", f"an answer to {file.stem}", message)
    return message


def _served(server: RemoteServer) -> str:
    models = server.ask("/v1/models").get("data") or []
    if not models:
        raise MoetoolError(f"{server.url}/v1/models lists no model; is the server ready?")
    return str(models[0]["id"])
