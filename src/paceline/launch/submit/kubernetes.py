"""The manifests of a job on Kubernetes: one pod for each machine, the first of which leads. Imports no torch.

Nothing here talks to a cluster. The secret of the machines is in no manifest: pods read it from a Secret that its owner makes.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

from paceline.errors import InputError
from paceline.launch.nodes.rendezvous import DEFAULT_PORT
from paceline.launch.submit import beginning
from paceline.launch.submit.options import IN_KUBERNETES
from paceline.launch.submit.request import SubmitRequest, label
from paceline.launch.submit.yaml_text import write
from paceline.training.options import RunOptions
from paceline.world.env import SECRET

Manifest = dict[str, Any]
RUNS = "/runs"
"""Where the claim is mounted."""
PENDING_S = 86400
"""How long pods wait for those that the cluster has no room for yet, where nobody says otherwise: giving up fails the job."""
MARGIN_S = 10
"""What a pod has beside --grace until it is killed."""
USER = 1000
"""The user of the Dockerfile's image."""
_TRAINER = "trainer.kubeflow.org"
_NODE = "node"
"""What Kubeflow's trainer calls the job and the container that train."""
_SCRIPT = """\
run={run}
job=${{JOB_UID:?}}
{meet}exec {train} $resume
"""
_MEET = """\
if [ "$JOB_COMPLETION_INDEX" = 0 ]; then
{beginning}
# The pod that leads says for all whether they resume: they may start before and after a checkpoint.
echo "$POD_IP $job $resume" > "$run/leader.partial"
mv "$run/leader.partial" "$run/leader"
else
until set -- $(cat "$run/leader" 2> /dev/null) && [ "$2" = "$job" ] && getent hosts {leader} | grep -qwF "$1"; do sleep 1; done
resume=$3
fi
"""


def text(request: SubmitRequest) -> str:
    """Return all manifests as one file of YAML, with what to do with it in front."""
    name, several = _name(request), request.nodes[1] > 1
    space = f" --namespace {request.submit.namespace}" if request.submit.namespace else ""
    head = [
        f"# Written by `paceline submit` for {IN_KUBERNETES}. It needs the volume claim {request.submit.claim}"
        + (", which all machines may write (ReadWriteMany)." if several else "."),
    ]
    if several:
        made = f"kubectl{space} create secret generic {_secret(name)} --from-literal=secret="
        head += [
            "# The secret that the machines share is in no manifest. Make it once, before this file is applied:",
            f'#   {made}"$(openssl rand -hex 32)"',
        ]
    return "\n".join(head) + "\n" + "---\n".join(write(one) for one in manifests(request))


def manifests(request: SubmitRequest) -> list[Manifest]:
    """Return what is to be applied, in its order."""
    name = _name(request)
    if not request.options.elastic and request.nodes[1] > 1:
        raise InputError("pods come and go by themselves, which --no-elastic does not survive. Leave it out.")
    match request.submit.kind:
        case "job":
            job = _object(request, "batch/v1", "Job", name, _job(request, f"{name}-0.{name}"))
            return [_service(request, name), job] if request.nodes[1] > 1 else [job]
        case "jobset":
            return [_object(request, "jobset.x-k8s.io/v1alpha2", "JobSet", name, _job_set(request, name))]
        case _:
            return _train_job(request, name)


def _job_set(request: SubmitRequest, name: str) -> Manifest:
    job = _job(request, _in_set(name), subdomain=False)
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
    }


def _train_job(request: SubmitRequest, name: str) -> list[Manifest]:
    """Return a runtime of this training's own and the TrainJob that uses it, of whose name the trainer makes a JobSet."""
    job = _job(request, _in_set(name), subdomain=False)
    limit = job.pop("activeDeadlineSeconds", None)
    container = job["template"]["spec"]["containers"][0]
    trainer = {
        "image": container["image"],
        "command": container.pop("command"),
        "numNodes": request.nodes[1],
        "resourcesPerNode": container.pop("resources"),
    }
    for counted in ("completions", "parallelism"):  # the trainer's to say
        del job[counted]
    step = {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}
    runtime = {
        "mlPolicy": {"numNodes": request.nodes[1]},
        "template": {
            "spec": {
                "network": {"publishNotReadyAddresses": True},
                "replicatedJobs": [{"name": _NODE, "template": {"metadata": step, "spec": job}}],
            }
        },
    }
    reference = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": name}
    spec = {"runtimeRef": reference, "trainer": trainer}
    if limit is not None:
        spec["activeDeadlineSeconds"] = limit
    version = f"{_TRAINER}/v1alpha1"
    return [
        _object(request, version, "TrainingRuntime", name, runtime),
        _object(request, version, "TrainJob", name, spec),
    ]


def _job(request: SubmitRequest, leader: str, *, subdomain: bool = True) -> Manifest:
    """Return the spec of an Indexed Job: as many pods as machines; one that is lost comes again under its number."""
    count = request.nodes[1]
    pod = _pod(request, leader)
    if subdomain and count > 1:
        pod["subdomain"] = _name(request)
    job: Manifest = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 10 * count,  # where the pod that leads is lost, the others fail, too
        "podFailurePolicy": {
            # A pod that was evicted or preempted is no failure of the training's; what is wrong with its input stays wrong.
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [InputError.exit_status]}},
            ]
        },
        "successPolicy": {"rules": [{"succeededIndexes": "0", "succeededCount": 1}]},
        "template": {"metadata": {"labels": _labels(request)}, "spec": pod},
    }
    if request.submit.seconds is not None:
        job["activeDeadlineSeconds"] = request.submit.seconds
    return job


def _pod(request: SubmitRequest, leader: str) -> Manifest:
    submit = request.submit
    amounts: Manifest = {"cpu": str(request.cores)}
    resources: Manifest = {"requests": amounts}
    if submit.gpus_per_node:
        resources["limits"] = {"nvidia.com/gpu": str(submit.gpus_per_node)}
    container: Manifest = {
        "name": _NODE,
        "image": submit.image,
        "command": ["/bin/sh", "-ec", _script(request, leader)],
        "env": [_from_field("JOB_UID", "metadata.labels['batch.kubernetes.io/controller-uid']")],
        "resources": resources,
        "volumeMounts": [{"name": "runs", "mountPath": RUNS}, {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
    }
    if request.nodes[1] > 1:
        secret = {"secretKeyRef": {"name": _secret(_name(request)), "key": "secret"}}
        container["env"] += [{"name": SECRET, "valueFrom": secret}, _from_field("POD_IP", "status.podIP")]
        container["ports"] = [{"name": "rendezvous", "containerPort": DEFAULT_PORT}]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(request.options.grace) + MARGIN_S,
        "shareProcessNamespace": True,  # else the launcher would be process 1, which SIGTERM does not end by itself
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": submit.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a container has 64 MB of its own
        ],
    }


def _script(request: SubmitRequest, leader: str) -> str:
    meeting = f"{leader}:{DEFAULT_PORT}"
    run = f"{RUNS}/{_folder(request)}"
    train = request.train(("paceline",), out=run, meeting=meeting)
    if request.nodes[1] > 1 and request.options.join_timeout == RunOptions.join_timeout:
        train = (*train, "--join-timeout", str(PENDING_S))
    begin = beginning.text(resume=request.options.resume)
    meet = _MEET.format(leader=leader, beginning=begin) if request.nodes[1] > 1 else begin
    # Kubernetes reads $(NAME) in a command before the shell does, and $$ as $.
    return _SCRIPT.format(run=run, meet=meet, train=shlex.join(train).replace("$", "$$"))


def _folder(request: SubmitRequest) -> str:
    """Return the name of the run folder below /runs; `big`, `runs/big` and `/runs/big` are one, `other/big` has another."""
    out = request.out
    return label(out.name, whole=out.name if str(out.parent) in (".", "runs", RUNS) else str(out))


def _name(request: SubmitRequest) -> str:
    """Return what the job, and what belongs to it, is called."""
    given = request.submit.job_name
    return f"paceline-{_folder(request)}" if given is None else label(given, whole=given)


def _from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _service(request: SubmitRequest, name: str) -> Manifest:
    """Return the headless service by which the pods of a Job have names."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(request),
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    return _object(request, "v1", "Service", name, spec)


def _object(request: SubmitRequest, version: str, kind: str, name: str, spec: Manifest) -> Manifest:
    about: Manifest = {"name": name, "labels": _labels(request)}
    if request.submit.namespace:
        about["namespace"] = request.submit.namespace
    return {"apiVersion": version, "kind": kind, "metadata": about, "spec": spec}


def _labels(request: SubmitRequest) -> dict[str, str]:
    return {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": _name(request)}


def _in_set(name: str) -> str:
    """Return the host name of the first pod of a JobSet."""
    return f"{name}-{_NODE}-0-0.{name}"


def _secret(name: str) -> str:
    return f"{name}-secret"
