"""Several machines, each a network namespace with a launcher of its own: lost, cut off, come back; the bits stay."""

import os
import signal
import time

from tests.fault.machines import TIMEOUT_S
from tests.patience import Stopwatch


def test_two_machines_come_to_the_bits_of_one_through_a_cut_that_heals_and_a_lost_worker(trial, bits):
    leader, follower = trial.net.machines
    leading, following = (trial.start(one, nodes="2", **{"max-restarts": 1}) for one in (leader, follower))
    trial.wait_until(lambda: trial.steps() >= 3)
    assert trial.places() == [0, 0, 1, 1]
    trial.net.cut(follower)
    time.sleep(TIMEOUT_S / 3)
    stood = trial.steps()
    trial.net.heal(follower)
    trial.wait_until(lambda: trial.steps() > stood + 1)
    assert trial.events("regrouped") == []
    lost = trial.roster()[-1]["pid"]
    os.kill(lost, signal.SIGKILL)
    trial.wait_until(lambda: trial.events("regrouped") and trial.events("regrouped")[-1]["workers"] == 4)
    assert trial.places() == [0, 0, 1, 1]
    assert lost not in [one["pid"] for one in trial.roster()]
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["restarts"]) == (0, bits, 1)
    assert [one["workers"] for one in result["recoveries"]] == [3, 4]
    status, told, _ = following.end()
    assert status == 0
    assert leader.address in told["led_by"]


def test_a_machine_that_loses_its_power_is_done_without_and_joins_again_when_it_is_back(trial, bits):
    leader, follower = trial.net.machines
    leading = trial.start(leader, nodes="1:2")
    trial.start(follower, nodes="1:2")
    trial.wait_until(lambda: trial.steps() >= 3)
    trial.wait_until(lambda: len(trial.roster()) == 4)
    follower.kill()
    trial.wait_until(lambda: len(trial.roster()) == 2)
    again = trial.start(follower, nodes="1:2")
    trial.wait_until(lambda: len(trial.roster()) == 4)
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["restarts"]) == (0, bits, 0)
    reasons = {one["workers"]: one["reason"] for one in result["recoveries"]}
    assert "was lost with its machine" in reasons[2]
    assert reasons[4] == "a worker joins"
    assert again.end()[0] == 0


def test_a_machine_that_is_cut_off_for_good_ends_by_itself_and_the_others_go_on(trial, bits):
    leader, follower = trial.net.machines
    leading, following = trial.start(leader, nodes="2"), trial.start(follower, nodes="2")
    trial.wait_until(lambda: trial.steps() >= 3)
    watch = Stopwatch()
    trial.net.cut(follower)
    trial.wait_until(lambda: watch.seconds() and following.process.poll() is not None)
    assert watch.seconds() < 3 * TIMEOUT_S
    status, told, said = following.end()
    assert (status, told) == (1, None)
    assert said.startswith(
        f"error: this machine is cut off from the run that {os.uname().nodename} (10.77.0.1) leads: "
    )
    assert f"for {TIMEOUT_S} s" in said
    assert follower.pids() == []
    trial.wait_until(lambda: len(trial.roster()) == 2)
    trial.hurry()
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"]) == (0, bits)
    assert [one["workers"] for one in result["recoveries"]] == [2]


def test_machines_meet_over_ipv6_also_where_the_leader_comes_last(trial, bits):
    leader, follower = trial.net.machines
    endpoint = f"[{leader.address_v6}]:29411"
    trial.hurry()
    following = trial.start(follower, nodes="2", rendezvous=endpoint)
    trial.wait_until(lambda: f"nobody leads at {endpoint} yet" in following.err.read_text())
    leading = trial.start(leader, nodes="2", rendezvous=endpoint)
    status, result, _ = leading.end()
    assert (status, result["weights_sha256"], result["recoveries"]) == (0, bits, [])
    status, told, _ = following.end()
    assert (status, told["led_by"]) == (0, f"{os.uname().nodename} ({leader.address_v6})")


def test_followers_end_with_the_leader(trial):
    leader, follower = trial.net.machines
    leading, following = trial.start(leader, nodes="2"), trial.start(follower, nodes="2")
    trial.wait_until(lambda: trial.steps() >= 1)
    leading.process.send_signal(signal.SIGKILL)
    status, _, said = following.end()
    assert status == 1
    assert "is cut off from the run" in said
    assert follower.pids() == []


def test_ctrl_c_where_it_leads_saves_what_all_machines_have_and_ends_them(trial):
    leader, follower = trial.net.machines
    leading, following = trial.start(leader, nodes="2"), trial.start(follower, nodes="2")
    trial.wait_until(lambda: trial.steps() >= 2)
    leading.process.send_signal(signal.SIGINT)
    status, result, said = leading.end()
    (saved,) = (trial.folder / "run" / "checkpoints").iterdir()
    assert (status, result) == (130, None)
    assert f"The newest checkpoint is of step {saved.name.removeprefix('step-')}; --resume" in said
    assert trial.events("regrouped") == trial.events("worker_lost") == []
    status, _, said = following.end()
    assert (status, said.count("it was interrupted there")) == (1, 1)
    assert follower.pids() == []
