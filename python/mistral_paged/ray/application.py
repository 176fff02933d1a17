"""The arguments of the application, and the deployments that they ask for."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from mistral_paged import cli
from mistral_paged import serve as server
from mistral_paged.config import nearest
from mistral_paged.exceptions import InvalidArgumentError
from mistral_paged.flags import COMMANDS, Flag, Usage
from mistral_paged.ray.deployments import Ingress, Replica, target_num_replicas
from mistral_paged.ray.routing import PrefixRouter

OWN = {
    "host": "each replica listens on a socket of its own, and Ray on its --http-port",
    "port": "each replica listens on a socket of its own, and Ray on its --http-port",
    "disable_metrics": "replicas are scaled by their metrics",
    "log": "Ray keeps what replicas write to standard error",
}
"""Flags of `serve` that are decided here, and why."""
ROUTERS = ("prefix", "least_loaded")


@dataclass
class Fleet:
    """The arguments that are Ray's matter; any other is a flag of `mistral-paged serve`."""

    min_replicas: int = 1
    """Replicas at least; 0 lets the last one end as well."""
    max_replicas: int = 1
    """Replicas at most."""
    target_ongoing_requests: float | None = None
    """Requests under way for each replica that scaling aims at; half of `max_seqs` unless given."""
    upscale_delay_s: float = 30.0
    """Seconds that more replicas must have been wanted."""
    downscale_delay_s: float = 600.0
    """Seconds that fewer replicas must have been wanted."""
    max_ongoing_requests: int | None = None
    """Requests that are sent to a replica at once; twice `max_seqs` unless given. Others wait in the router."""
    num_cpus: float = 1.0
    """Cores of a replica; it has as many threads, unless `num_threads` says otherwise."""
    num_gpus: float = 0.0
    """GPUs of a replica."""
    router: str = "prefix"
    """`prefix`: where the longest beginning of a prompt went before; `least_loaded`: Ray's own choice of two."""
    health_check_period_s: float = 5.0
    """Seconds between two checks of a replica's health."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise InvalidArgumentError(
                f"`min_replicas` is {self.min_replicas} and `max_replicas` {self.max_replicas}: "
                "the first is from 0 to the second, which is 1 or more"
            )
        if self.router not in ROUTERS:
            raise InvalidArgumentError(f"`router` is {self.router!r}; it must be {' or '.join(ROUTERS)}")
        for name in ("num_cpus", "num_gpus", "upscale_delay_s", "downscale_delay_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidArgumentError(f"`{name}` is {getattr(self, name)}; it must be 0 or more")
        for name in ("target_ongoing_requests", "max_ongoing_requests", "health_check_period_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidArgumentError(f"`{name}` is {value}; it must be above 0")


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application of these arguments, which may be texts, as `serve run mistral_paged.ray:build_app KEY=VALUE` gives them.

    Those of `Fleet` are Ray's. `kind` is text, multimodal or embedding. Any other is a flag of `mistral-paged serve` by its name
    in a configuration file: `model`, `isq`, `pa_memory_mb`, `served_model_name`, `api_keys`. Without `model` it is the default
    model. Raises `InvalidArgumentError`, naming the argument.
    """
    given = {str(key): value for key, value in args.items()}
    fleet = read_fleet(given)
    words = list(command_line(given))
    options = parse(words)
    if options.num_threads is None and fleet.num_gpus == 0:
        words.append(f"--num-threads={max(1, int(fleet.num_cpus))}")
    replica = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": fleet.num_cpus, "num_gpus": fleet.num_gpus},
        max_ongoing_requests=fleet.max_ongoing_requests or 2 * options.max_seqs,
        max_queued_requests=options.max_queued,
        health_check_period_s=fleet.health_check_period_s,
        health_check_timeout_s=max(10.0, 2 * fleet.health_check_period_s),
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        autoscaling_config=AutoscalingConfig(
            min_replicas=fleet.min_replicas,
            max_replicas=fleet.max_replicas,
            target_ongoing_requests=fleet.target_ongoing_requests or options.max_seqs / 2,
            upscale_delay_s=fleet.upscale_delay_s,
            downscale_delay_s=fleet.downscale_delay_s,
            policy=AutoscalingPolicy(policy_function=target_num_replicas),
        ),
        **({"request_router_config": RequestRouterConfig(request_router_class=PrefixRouter)} if fleet.router == "prefix" else {}),
    )
    ingress = serve.deployment(
        Ingress, name="Ingress", num_replicas=1, max_ongoing_requests=options.max_connections, ray_actor_options={"num_cpus": 0}
    )
    # Replicas may run where the environment is another.
    key = os.environ.get("MISTRAL_PAGED_API_KEY")
    if key is None and (options.api_key or options.api_keys):
        key = secrets.token_urlsafe(32)
    return ingress.bind(replica.bind(words, key), options.max_body_mb << 20)


def read_fleet(given: dict[str, Any]) -> Fleet:
    """Takes Ray's arguments out of `given`."""
    found: dict[str, Any] = {}
    for field in fields(Fleet):
        if field.name in given:
            kind = str if field.type == "str" else int if str(field.type).startswith("int") else float
            value = given.pop(field.name)
            try:
                found[field.name] = kind(value)
            except (TypeError, ValueError):
                raise InvalidArgumentError(f"`{field.name}` is {value!r}; it must be {kind.__name__}") from None
    return Fleet(**found)


def command_line(given: Mapping[str, Any]) -> Iterator[str]:
    """The words of `mistral-paged serve` that the other arguments mean."""
    yield "serve"
    rest = dict(given)
    kind = str(rest.pop("kind", "auto"))
    if kind not in server.KINDS:
        raise InvalidArgumentError(f"`kind` is {kind!r}; it must be one of {', '.join(server.KINDS)}")
    yield kind
    known = {key: flag for group in COMMANDS["serve"][1] for flag in group.flags for key in flag.keys}
    for key, value in rest.items():
        if key in OWN:
            raise InvalidArgumentError(f"`{key}` cannot be given: {OWN[key]}")
        if key not in known:
            names = [field.name for field in fields(Fleet)]
            raise InvalidArgumentError(f"there is no argument `{key}`{nearest(key, [*names, *known])}")
        yield from words_of(known[key], key, value)


def words_of(flag: Flag, key: str, value: Any) -> Iterator[str]:
    """The words of one flag."""
    if flag.metavar is None:
        if str(value).lower() not in ("true", "false"):
            raise InvalidArgumentError(f"`{key}` is {value!r}; it must be true or false")
        if str(value).lower() == "true":
            yield flag.name
        return
    values = value if isinstance(value, (list, tuple)) else [value]
    if flag.several:
        yield flag.name
        yield from map(str, values)
        return
    for one in values:
        yield f"{flag.name}={one}"


def parse(words: list[str]) -> argparse.Namespace:
    """What the words mean, checked as the command line would."""
    said = io.StringIO()
    parser = cli.build_parser()
    try:
        with contextlib.redirect_stderr(said):
            options = parser.parse_args(words)
            if options.command == "serve":
                server.check([options], server.settings([options], 0))
    except SystemExit:
        message = said.getvalue().strip().rsplit("error: ", 1)[-1]
        raise InvalidArgumentError(message) from None
    except Usage as error:
        raise InvalidArgumentError(str(error)) from None
    return options
