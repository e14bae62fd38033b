"""`shardq doctor`: what is wrong with this installation, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import click

from cli.doctor.findings import Finding, Grade, ok, show
from cli.doctor.link import COST_PER_GB, check_link
from cli.doctor.machine import check_database, check_disk, check_gpu, check_model, check_versions
from cli.doctor.queue import check_queue
from cli.doctor.roles import Place, Role, place_of
from cli.doctor.wire import check_wire
from cli.errors import ExitCode
from cli.options import broker_option, database_option, insecure_option, json_option, relay_option
from cli.output import print_json


@click.command("doctor")
@click.option("--model", metavar="MODEL", help="Also look at this model's files.  [env: SHARDQ_MODEL]")
@click.option(
    "--role",
    type=click.Choice([each.value for each in Role]),
    help="What this machine is there for. Default: as account and settings say, else `client`.",
)
@click.option("--link", is_flag=True, help="Measure the link instead, and say what to expect of it.")
@click.option(
    "--cost-per-gb",
    type=click.FloatRange(min=0),
    default=COST_PER_GB,
    show_default=True,
    help="With --link: dollars for a GB that leaves the host.",
)
@json_option
@database_option
@broker_option
@relay_option
@insecure_option
@click.pass_context
def doctor_command(
    ctx: click.Context, role: str | None, model: str | None, link: bool, cost_per_gb: float, as_json: bool
) -> None:
    """Say what is wrong with this installation.

    Looks at versions, GPUs, disk, database, both Redis servers, their certificates, bookkeeper, heads, tails and
    a model's files, as far as the role of this machine needs them and its account may see them. Shows no password.
    With --link: this machine's way to both servers, and for every pair at work tokens/s, GB and cost an hour, and
    what limits it.
    Exit status 1 if something does not work that this role needs.

    \b
    shardq doctor
    shardq doctor --role head
    shardq doctor --model ./Qwen2.5-7B-Instruct
    shardq doctor --link
    """
    findings: list[Finding] = []
    model = model or os.environ.get("SHARDQ_MODEL")
    place = place_of(Role(role) if role else None)
    checks = [partial(check_link, place, cost_per_gb)] if link else _checks(place, model)
    for check in checks:
        for finding in check():
            findings.append(finding)
            if not as_json:
                show(finding)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    if any(finding.grade == Grade.FAILED for finding in findings):
        ctx.exit(ExitCode.ERROR)


def _checks(place: Place, model: str | None) -> Iterator[Callable[[], Iterator[Finding]]]:
    yield lambda: iter([ok("role", f"{place.role}, {place.reason}")])
    yield partial(check_versions, place)
    if place.role != Role.FLOWER:
        yield partial(check_gpu, place)
    yield check_disk
    if place.role in (Role.HOST, Role.CLIENT):
        yield check_database
    yield partial(check_queue, place, model)
    yield partial(check_wire, place, model)
    if place.role != Role.FLOWER:
        yield partial(check_model, model)
