"""A folder of draft heads that are experts for one domain each, and what is known about them.

    heads/
        experts.json            target, options, and per finished domain its weights and held-out figures
        law/answers/            what the target answers to prompts of the domain
        law/features/           its hidden states over them
        law/weights/            the head, named in a pool as eagle3:heads/law/weights

A domain without an entry is not finished, whatever its folder holds; the same command goes on with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptspec.cli.outputs import write_output
from adaptspec.cli.prompts import Prompt
from experiments.folder_lock import folder_lock

FORMAT = "adaptspec-experts"
VERSION = 1
KIND = "eagle3"
LISTING = "experts.json"


@dataclass(frozen=True, slots=True)
class ExpertFolder:
    """Experts on disk. `experts.json` is written whole or not at all, and names a domain when its head is finished."""

    path: Path

    @classmethod
    def begin(cls, path: Path, about: Mapping[str, Any]) -> ExpertFolder:
        """A new folder, or one to go on with.

        Args:
            about: target and options by name, plain values.

        Raises:
            FileExistsError: the folder holds something else.
            ValueError: it was made with something other than `about`; names what.
        """
        folder = cls(path)
        wanted = json.loads(json.dumps(about))
        if not (path / LISTING).is_file():
            if path.exists() and not all(entry.name.startswith(".") for entry in path.iterdir()):
                raise FileExistsError(f"{path} already holds something other than experts; give another --out")
            path.mkdir(parents=True, exist_ok=True)
            folder._write({"format": FORMAT, "version": VERSION, "kind": KIND, **wanted, "domains": {}})
            return folder
        found = folder.listing()
        for part, values in wanted.items():
            before = found.get(part)
            for name in values if isinstance(before, dict) else ():
                if before.get(name) != values[name]:
                    raise ValueError(
                        f"{path} was made with {name} = {before.get(name)!r} ({part}), this call has {values[name]!r}; "
                        "choose another --out, or the same to continue"
                    )
        return folder

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes out, see `folder_lock`."""
        return folder_lock(self.path)

    def listing(self) -> dict[str, Any]:
        """The content of `experts.json`.

        Raises:
            FileNotFoundError: no experts in the folder.
            ValueError: the file is damaged, or of another version.
        """
        path = self.path / LISTING
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.path} holds no experts ({LISTING} is missing); make some with python -m experiments.experts"
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("domains"), dict):
            raise ValueError(f"{path} does not describe experts")
        if found.get("version") != VERSION:
            raise ValueError(f"{path}: version must be {VERSION}, got {found.get('version')!r}")
        return found

    def part(self, domain: str, name: str) -> Path:
        """Where a domain's "answers", "features" or "weights" lie."""
        return self.path / domain_folder(domain) / name

    def finish(self, domain: str, entry: Mapping[str, Any]) -> None:
        """Note a finished domain."""
        found = self.listing()
        folder = self.part(domain, "weights").relative_to(self.path).as_posix()
        found["domains"][domain] = {"folder": folder, **entry}
        self._write(found)

    def heads(self) -> dict[str, str]:
        """Per finished domain the absolute path of its weights."""
        return {domain: str((self.path / entry["folder"]).resolve()) for domain, entry in self._entries()}

    def learnt(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Those of the prompts that a head was trained or judged on."""
        known = {digest for _, entry in self._entries() for digest in entry["turns"]}
        return [prompt for prompt in prompts if known.intersection(map(short_digest, prompt.turns))]

    def _entries(self) -> list[tuple[str, dict[str, Any]]]:
        entries = list(self.listing()["domains"].items())
        for domain, entry in entries:
            if not isinstance(entry, dict) or not {"folder", "turns"} <= entry.keys():
                raise ValueError(f"{self.path / LISTING} is damaged: the domain {domain!r} lacks its folder or turns")
        return entries

    def _write(self, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
        write_output(self.path / LISTING, text + "\n", force=True)


def domain_folder(domain: str) -> str:
    """A domain as the name of a folder; what is changed or left out is made up for by a few digits.

    >>> domain_folder("law"), domain_folder("Q & A")
    ('law', 'Q___A-2529a7')
    """
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in domain)[:80]
    return name if name == domain else f"{name}-{hashlib.sha256(domain.encode()).hexdigest()[:6]}"


def short_digest(text: str) -> str:
    """A text as 16 digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
