"""The commands `cache` and `login`, over huggingface_hub."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from mistral_paged.exceptions import MistralPagedError, ModelNotFoundError
from mistral_paged.hub import local_path

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

MB = 10**6


def scan(options: argparse.Namespace) -> HFCacheInfo | None:
    """What the cache holds; None where there is none."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(None if options.hf_cache is None else local_path(options.hf_cache))
    except CacheNotFound:
        return None


def cache_list(options: argparse.Namespace) -> None:
    """Prints the repositories of the cache, the largest first."""
    found = scan(options)
    repos = sorted(found.repos if found is not None else (), key=lambda repo: (-repo.size_on_disk, repo.repo_id))
    if options.json:
        rows = [
            {"id": repo.repo_id, "type": repo.repo_type, "bytes": repo.size_on_disk, "path": str(repo.repo_path)}
            for repo in repos
        ]
        print(json.dumps(rows))
        return
    for repo in repos:
        print(
            f"{repo.size_on_disk / MB:>12.1f} MB  {repo.repo_id}" + ("" if repo.repo_type == "model" else f" ({repo.repo_type})")
        )
    if not repos:
        print("the cache is empty")


def cache_delete(options: argparse.Namespace) -> None:
    """Deletes all revisions of a model from the cache."""
    found = scan(options)
    models = [repo for repo in (found.repos if found is not None else ()) if repo.repo_type == "model"]
    chosen = [repo for repo in models if repo.repo_id == options.model_id]
    if found is None or not chosen:
        there = ", ".join(sorted(repo.repo_id for repo in models)) or "no model"
        raise ModelNotFoundError(f"the cache has no model {options.model_id!r}; it has {there}")
    # Copies of a repository have the same hashes, so the others are kept out of sight.
    only = replace(found, repos=frozenset(chosen))
    only.delete_revisions(*(revision.commit_hash for repo in chosen for revision in repo.revisions)).execute()
    print(f"deleted {options.model_id}, {sum(repo.size_on_disk for repo in chosen) / MB:.1f} MB")


def login(options: argparse.Namespace) -> None:
    """Keeps a token for the hub where every program that uses the hub finds it, after the hub has accepted it."""
    import huggingface_hub

    token = options.token
    if token is None:
        token = getpass.getpass("token: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not token.strip():
        raise MistralPagedError("no token was given; give one with --token, or on standard input")
    try:
        huggingface_hub.login(token=token.strip(), add_to_git_credential=False)
    except Exception as error:  # which ones, depends on the HTTP library of huggingface_hub
        raise MistralPagedError(f"the hub did not accept the token: {' '.join(str(error).split())[:300]}") from error
    print("the token is kept")
