"""Where workers are given a place."""

import dataclasses

import pytest

from paceline.errors import InputError
from paceline.launch.base import LaunchSpec
from paceline.launch.job import ScriptCall
from paceline.launch.local import LocalLauncher
from paceline.launch.membership import Membership
from paceline.launch.nodes.inventory import LEADER, Node, Nodes
from paceline.launch.workers.roster import Roster
from paceline.launch.workers.scheduler import WorkerScheduler


def test_a_store_that_cannot_be_served_is_a_line():
    plan = LocalLauncher().plan(LaunchSpec(call=ScriptCall(target="script.py", is_module=False), workers=1))
    job = plan.jobs[0]
    elsewhere = dataclasses.replace(job.identity, master_address="192.0.2.1")  # no address of any machine
    plan = dataclasses.replace(plan, jobs=(dataclasses.replace(job, identity=elsewhere),))
    nodes = Nodes(Node(LEADER, "host", None, plan.address, wanted=1))
    scheduler = WorkerScheduler(plan, nodes, Roster(), Membership(plan.policy, lambda: 0.0))
    try:
        with pytest.raises(
            InputError, match=r"cannot be served at 192.0.2.1: Cannot assign requested address\."
        ):
            scheduler.open_store()
    finally:
        scheduler.close()
