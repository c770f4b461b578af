"""The manifests for Kubernetes.

Jobs, Services and the pods in them are checked against the JSON schemas of Kubernetes that `kubernetes-validate` ships, strictly:
a field that Kubernetes does not know fails. JobSet, TrainJob and TrainingRuntime are not Kubernetes' own; their fields are
checked against what `schemas/` holds of their definitions (what that leaves out is said there). What no schema says is checked
here: that the objects name each other rightly, and that the shell script of a pod does what it is for. No cluster has run them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from paceline.cli import main
from paceline.launch.submit.yaml_text import write

SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = ("1.31", "1.33")
"""The oldest that has all fields, and one that has them for good."""
IN_THE_IMAGE = "their.module:Task"
"""A task whose settings are checked there alone."""
MANY = (
    "--nodes",
    "4",
    "--gpus-per-node",
    "2",
    "--shards",
    "8",
    "--time",
    "2h",
    "--grace",
    "50",
    "--namespace",
    "lab",
)


@pytest.fixture
def manifests(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def make(*arguments, task="digits"):
        command = [
            "paceline",
            "submit",
            task,
            "--on",
            "kubernetes",
            "--dry-run",
            "--out",
            "runs/My Run",
            *arguments,
        ]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            main.run()
        out, err = capsys.readouterr()
        assert (ended.value.code, err) == (0, "")
        assert "0123456789abcdef" not in out
        return out, {one["kind"]: one for one in yaml.safe_load_all(out)}

    monkeypatch.setenv("PACELINE_SECRET", "0123456789abcdef0123456789abcdef")  # which is for nobody to see
    return make


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_wrong_input_fails_the_job_at_once_and_an_eviction_does_not(manifests, kind):
    _, found = manifests("--kind", kind, *MANY)
    evicted, refused = job_spec(found)["podFailurePolicy"]["rules"]
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert refused == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}


def job_spec(found):
    """Find the spec of the Job in whatever holds it."""
    if "Job" in found:
        return found["Job"]["spec"]
    held = found.get("JobSet") or found["TrainingRuntime"]["spec"]["template"]
    (one,) = held["spec"]["replicatedJobs"]
    return one["template"]["spec"]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("arguments", [(), MANY], ids=["one", "several"])
def test_they_pass_the_schemas(kind, arguments, manifests):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    ).validate
    jsonschema = pytest.importorskip("jsonschema")
    _, found = manifests("--kind", kind, *arguments)
    for name, one in found.items():
        for version in VERSIONS:
            if name in ("Job", "Service"):
                validate(one, version, strict=True)
        if name in ("JobSet", "TrainJob", "TrainingRuntime"):
            known = json.loads((SCHEMAS / f"{name.lower()}.json").read_text())
            assert (one["apiVersion"], one["kind"]) == (known["apiVersion"], known["kind"])
            schema = {**known["spec"], "$defs": {"job": {"$id": "job-spec", "type": "object"}}}
            jsonschema.Draft202012Validator(schema).validate(one["spec"])
    for version in VERSIONS:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "it"}, "spec": job_spec(found)}
        validate(job, version, strict=True)


def test_the_check_finds_what_is_wrong(manifests):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    ).validate
    jsonschema = pytest.importorskip("jsonschema")
    _, found = manifests(*MANY)
    found["Job"]["spec"]["template"]["spec"]["gracePeriod"] = 1
    with pytest.raises(jsonschema.ValidationError, match="gracePeriod"):
        validate(found["Job"], VERSIONS[0], strict=True)


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_the_parts_fit_together(kind, manifests):
    text, found = manifests("--kind", kind, *MANY)
    job = job_spec(found)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    trainer = found["TrainJob"]["spec"]["trainer"] if kind == "trainjob" else container
    counted = {trainer["numNodes"]} if kind == "trainjob" else {job["completions"], job["parallelism"]}
    assert counted == {4}
    assert (job["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert pod["terminationGracePeriodSeconds"] == 60  # --grace and a margin
    resources = trainer["resourcesPerNode" if kind == "trainjob" else "resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "2"}
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "paceline-runs"}
    assert all(one["metadata"]["namespace"] == "lab" for one in found.values())
    limits = [
        job.get("activeDeadlineSeconds"),
        found.get("TrainJob", {}).get("spec", {}).get("activeDeadlineSeconds"),
    ]
    assert sorted(limits, key=str) == [7200, None]
    (secret,) = [
        one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == "PACELINE_SECRET"
    ]
    assert (
        f"kubectl --namespace lab create secret generic {secret['name']} --from-literal={secret['key']}="
        in text
    )
    script = trainer["command"][2]
    (folder,) = re.findall(r"--out /runs/(my-run-[0-9a-f]{8}) ", script)
    name = f"paceline-{folder}"
    leader = f"{name}-0.{name}" if kind == "job" else f"{name}-node-0-0.{name}"
    assert f"--rendezvous {leader}:{container['ports'][0]['containerPort']}" in script
    if kind == "job":
        service = found["Service"]
        assert pod["subdomain"] == service["metadata"]["name"] == name
        assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
        assert service["spec"]["clusterIP"] == "None"
    elif kind == "trainjob":
        assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]


def test_one_machine_needs_no_service_and_no_secret(manifests):
    text, found = manifests("--workers", "2")
    assert found.keys() == {"Job"}
    assert "secret" not in text.lower()
    assert "rendezvous" not in text


def test_other_folders_and_names_for_other_runs(manifests):
    def places(*arguments):
        _, found = manifests(*arguments)
        (run,) = re.findall(r"^run=/runs/(\S+)$", script_of(found), re.MULTILINE)
        name = found["Job"]["metadata"]["name"]
        assert re.fullmatch(r"[a-z][a-z0-9-]{0,49}", name)
        return run, name

    assert {places("--out", out) for out in ("big", "runs/big", "/runs/big")} == {("big", "paceline-big")}
    alike = ["big", "a/big", "b/big", "runs/a/big", "exp_1", "exp-1", "Exp.1", "1"]
    alike += [f"{'x' * 60}{last}" for last in "12"]
    found = [places("--out", out) for out in alike]
    assert len({run for run, _ in found}) == len({name for _, name in found}) == len(alike)
    names = [places("--job-name", name)[1] for name in ("it", "It", "y" * 60, "y" * 61)]
    assert len(set(names)) == len(names)
    assert names[0] == "it"


def script_of(found):
    return job_spec(found)["template"]["spec"]["containers"][0]["command"][2]


def test_kubernetes_puts_no_variable_into_what_the_user_gives(manifests):
    _, job = manifests(*MANY, "--set", "lr=a$$b$(PACELINE_SECRET)", task=IN_THE_IMAGE)
    assert "'lr=a$$$$b$$(PACELINE_SECRET)'" in script_of(job)


@pytest.fixture
def pod(manifests, tmp_path):
    """Run a pod's script with the run folder here, and stand-ins for `paceline` and the cluster's names."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "paceline").write_text('#!/bin/sh\necho "$@"\n')
    (programs / "getent").write_text('#!/bin/sh\necho "10.0.0.7  $2"\n')
    for one in programs.iterdir():
        one.chmod(0o755)

    made = {}

    def start(index, address="10.0.0.9", *, job="a-1", options=MANY):
        if options not in made:
            made[options] = script_of(manifests(*options)[1])
        script = re.sub(r"^run=.*$", f"run={tmp_path}/run", made[options], flags=re.MULTILINE)
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "JOB_COMPLETION_INDEX": str(index),
            "POD_IP": address,
            "JOB_UID": job,
        }
        command = ["/bin/sh", "-ec", script]
        return subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


def test_pods_resume_as_the_one_that_leads_does(pod, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "begun-by").write_text("a-1\n")
    (run / "leader").write_text("10.0.0.3 a-1 --resume\n")  # of a pod that is gone
    (run / "events.jsonl").write_text("")  # of a run that has saved nothing
    follower = pod(1)
    with pytest.raises(subprocess.TimeoutExpired):
        follower.wait(0.3)
    out, err = pod(0, "10.0.0.7").communicate()
    assert err == ""
    assert out.startswith("train digits ")
    assert "--resume" not in out
    assert not (run / "events.jsonl").exists()
    (run / "checkpoints" / "step-3").mkdir(parents=True)  # meanwhile
    assert follower.communicate() == (out, "")
    out, _ = pod(0, "10.0.0.7").communicate()
    assert out.endswith(" --resume\n")
    assert pod(3).communicate() == (out, "")


@pytest.mark.parametrize("options", [(), MANY], ids=["one", "several"])
def test_a_job_goes_on_with_what_it_began_and_with_nothing_else(options, pod, tmp_path):
    run = tmp_path / "run"

    def leads(job, *more):
        started = pod(0, "10.0.0.7", job=job, options=(*options, *more))
        return *started.communicate(), started.returncode

    remedy = "Choose another --out, or submit with --resume to go on with it."
    refused = ("", f"error: {run} holds a run that this job did not begin. {remedy}\n", 2)
    out, err, status = leads("a-1")
    assert (err, status, "--resume" in out) == ("", 0, False)
    assert leads("b-2") == refused  # it may train at this moment
    (run / "events.jsonl").write_text("events")
    assert leads("b-2") == refused
    assert (run / "events.jsonl").read_text() == "events"
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    assert leads("a-1")[0].endswith(" --resume\n")
    assert leads("b-2") == refused
    (run / "begun-by").unlink()  # a run of nobody's job
    assert leads("a-1") == refused
    out, err, status = leads("b-2", "--resume")
    assert (out.endswith(" --resume\n"), err, status) == (True, "", 0)
    assert leads("a-1") == refused
    assert leads("b-2", "--resume")[2] == 0
    assert leads("")[2] == 2  # no cluster that says whose pod it is


def test_a_resume_of_nothing_never_begins_anew(pod):
    for _ in range(2):  # Kubernetes starts a pod that fails again
        out, _ = pod(0, "10.0.0.7", options=(*MANY, "--resume")).communicate()
        assert out.endswith(" --resume\n")  # which paceline refuses


def test_pods_wait_for_the_leader_of_their_own_job(pod, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "leader").write_text("10.0.0.7 b-2 --resume\n")
    follower = pod(1)
    with pytest.raises(subprocess.TimeoutExpired):
        follower.wait(0.3)
    (tmp_path / "run" / "leader").write_text("10.0.0.7 a-1 \n")
    out, err = follower.communicate()
    assert ("--resume" in out, err) == (False, "")


def test_the_pod_is_told_which_job_it_is_of(manifests):
    for kind in ("job", "jobset", "trainjob"):
        _, found = manifests("--kind", kind)
        (told,) = job_spec(found)["template"]["spec"]["containers"][0]["env"]
        field = {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
        assert told == {"name": "JOB_UID", "valueFrom": {"fieldRef": field}}


@pytest.mark.parametrize(
    "sign", ["\u2028", "\u2029", "\x85", "\x07", "\x7f", "\ufeff", "\n", "\t", "\U0001f600"]
)
def test_any_sign_in_a_setting_stays_in_the_script(sign, manifests):
    text, found = manifests("--set", f"name=a{sign}b: c \U0001f600", task=IN_THE_IMAGE)
    assert f"name=a{sign}b: c \U0001f600" in script_of(found)
    assert all(line.isprintable() for line in text.split("\n"))


def test_yaml_is_read_back_as_it_was():
    value = {
        "plain": "a/b-c.d",
        "words": [
            "yes",
            "No",
            "null",
            "1.5",
            "0x1f",
            "",
            " x",
            "a: b",
            "# c",
            "- d",
            "*e",
            "ü\n",
            "a\tb",
            "\U0001f600 \u2028",
            "true",
        ],
        "script": "if x; then\n  y\n\nfi\n",
        "numbers": {"int": 3, "bool": True, "none": None, "empty": {}, "list": []},
        "nested": [{"a": 1, "b": [{"c": "text\nof lines\n"}]}, ["x"]],
        "8080": "key",
    }
    assert yaml.safe_load(write(value)) == value
