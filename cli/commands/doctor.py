"""`shardq doctor`: what is wrong with this installation, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import click

from cli.doctor.findings import Finding, Grade, show
from cli.doctor.link import COST_PER_GB, check_link
from cli.doctor.machine import check_database, check_disk, check_model, check_versions
from cli.doctor.security import check_security
from cli.doctor.servers import check_queue, check_wire
from cli.errors import ExitCode
from cli.options import broker_option, database_option, insecure_option, json_option, relay_option
from cli.output import print_json


@click.command("doctor")
@click.option("--model", metavar="MODEL", help="Also look at this model's files.  [env: SHARDQ_MODEL]")
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
def doctor_command(ctx: click.Context, model: str | None, link: bool, cost_per_gb: float, as_json: bool) -> None:
    """Say what is wrong with this installation.

    Looks at versions, disk, database, both Redis servers, their certificates, bookkeeper, heads, tails and a
    model's files. Shows no password.
    With --link: this machine's way to both servers, and for every pair at work tokens/s, GB and cost an hour, and
    what limits it.
    Exit status 1 if something does not work.

    \b
    shardq doctor
    shardq doctor --model ./Qwen2.5-7B-Instruct
    shardq doctor --link
    """
    findings: list[Finding] = []
    checks = [partial(check_link, cost_per_gb)] if link else _checks(model or os.environ.get("SHARDQ_MODEL"))
    for check in checks:
        for finding in check():
            findings.append(finding)
            if not as_json:
                show(finding)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    if any(finding.grade == Grade.FAILED for finding in findings):
        ctx.exit(ExitCode.ERROR)


def _checks(model: str | None) -> list[Callable[[], Iterator[Finding]]]:
    return [
        check_versions,
        check_disk,
        check_database,
        check_queue,
        check_wire,
        check_security,
        lambda: check_model(model),
    ]
