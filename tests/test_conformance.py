"""Cases of other servers' own tests, sent to this one. docs/conformance.md lists them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conformance import report
from conformance.exchange import Exchange
from conformance.form import Case, File, check_fields
from conftest import GOLDEN
from test_server import Server, serving

from mistral_paged.default_model import default_model

SERVERS: dict[str, tuple[str, ...]] = {
    "tiny": ("--served-model-name", "other"),
    "bos": (),
    "default": (),
    "no-ui": ("--no-ui",),
    "keys": ("--api-key", "secret"),
    "cors": ("--cors-origin", "http://web.mydomain.fr"),
    "one at once": ("--max-seqs", "1"),
    "two at once": ("--max-seqs", "2"),
    "16 tokens a step": ("--max-num-batched-tokens", "16"),
    "32 tokens a step": ("--max-num-batched-tokens", "32"),
}


def with_bos(folder: Path) -> Path:
    """The tiny model, whose tokenizer puts BOS before a text."""
    shutil.copytree(GOLDEN / "text" / "llama", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class Servers:
    """Servers, each from the first case that asks it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.running: dict[str, Server] = {}

    def __call__(self, name: str) -> Server:
        if name not in self.running:
            arguments = (*SERVERS[name], "--disable-access-log")
            context = serving(*arguments, model=str(self.model(name)), memory="256" if name == "default" else "16")
            self.running[name] = self.stack.enter_context(context)
        return self.running[name]

    def model(self, name: str) -> Path:
        match name:
            case "default":
                return default_model()
            case "bos":
                return with_bos(self.folder / "bos")
            case _:
                return GOLDEN / "text" / "llama"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack, tmp_path_factory.mktemp("models"))


CASES = [(file, case) for file in report.FILES for case in file.cases]


@pytest.mark.parametrize(("file", "case"), CASES, ids=[f"{file.peer}-{case.test}-{case.what}" for file, case in CASES])
def test_a_peers_case(servers: Servers, file: File, case: Case) -> None:
    exchange = Exchange.of(servers, servers(case.on), case.send)
    assert exchange.reply.status == case.status, exchange.reply.body
    check_fields(exchange.answer, case.fields)
    if case.holds is not None:
        assert case.holds(exchange) is not False


def test_there_are_150_cases_of_three_peers_each_with_a_name_of_its_own() -> None:
    names = [(file.peer, file.path, case.test, case.what) for file, case in CASES]
    assert len(names) == len(set(names))
    assert len({peer for peer, *_ in names}) == 3
    assert sum(not case.differs for _, case in CASES) >= 150


def test_the_page_lists_these_cases() -> None:
    assert report.PAGE.read_text() == report.page(), "run python tests/conformance/report.py"
