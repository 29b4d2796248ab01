"""RayJobs, as KubeRay's operator takes them from step to step. What InteractiveMode needs is whole; of the other modes, which
submit for themselves, nothing is submitted."""

from __future__ import annotations

import asyncio
import base64
import calendar
import copy
import json
import time
from typing import Any

import aiohttp

from . import rules, stub
from .podspec import token_secret
from .store import RESOURCES, Object, Refused, now, suffix

CLUSTERS, JOBS = RESOURCES["rayclusters"], RESOURCES["rayjobs"]
FINALIZER = "ray.io/rayjob-finalizer"
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class RayJobs:
    """The half of the operator that looks after RayJobs."""

    async def job(self, job: Object) -> None:
        meta, spec = job["metadata"], job["spec"]
        if spec.get("managedBy", "ray.io/kuberay-operator") != "ray.io/kuberay-operator":
            return
        if "deletionTimestamp" in meta:
            if FINALIZER in meta.get("finalizers", []):
                await self._stop(job)
                meta["finalizers"].remove(FINALIZER)
                self.store.touch("rayjobs", job)
                self.store._maybe_gone(JOBS, job)
            return
        status = copy.deepcopy(job.get("status") or {})
        try:
            rules.name("RayJob", meta["name"], 47)
            rules.job_spec(spec)
        except rules.Invalid as error:
            reason = "InvalidRayJobMetadata" if "metadata" in str(error) else "InvalidRayJobSpec"
            if self.refused.get(meta["uid"]) != meta["generation"]:
                self.refused[meta["uid"]] = meta["generation"]
                self._event(job, "Warning", reason, f"{meta['namespace']}/{meta['name']}: {error}")
            said = {
                "jobDeploymentStatus": "ValidationFailed",
                "reason": "ValidationFailed",
                "message": str(error),
            }
            status |= said
        else:
            await self._step(job, status)
        if (
            status != (job.get("status") or {})
            and self.store.find("rayjobs", meta["namespace"], meta["name"]) is job
        ):
            job["status"] = {**status, "observedGeneration": meta["generation"]}
            self.store.touch("rayjobs", job)

    async def _step(self, job: Object, status: Object) -> None:
        """One step of its life; changes the status that it is given."""
        meta, spec, phase = job["metadata"], job["spec"], status.get("jobDeploymentStatus", "")
        if phase == "":
            if FINALIZER not in meta.setdefault("finalizers", []):
                meta["finalizers"].append(FINALIZER)
                self.store.touch("rayjobs", job)
            chosen = (spec.get("clusterSelector") or {}).get("ray.io/cluster")
            status |= {
                "jobDeploymentStatus": "Initializing", "startTime": now(), "failed": 0, "succeeded": 0, "jobStatus": "",
                "rayClusterName": chosen or f"{meta['name']}-{suffix()}",
            }  # fmt: skip
            if spec.get("submissionMode") != "InteractiveMode":
                status["jobId"] = spec.get("jobId") or f"{meta['name']}-{suffix()}"
        elif phase in ("Initializing", "Waiting", "Running"):
            if self._too_late(spec, status, phase):
                return
            cluster = self._cluster_of(job, status)
            if cluster is None:
                return
            if phase == "Initializing":
                status["rayClusterStatus"] = copy.deepcopy(cluster.get("status") or {})
                if (cluster.get("status") or {}).get("state") == "ready":
                    service = cluster["status"]["head"]["serviceName"]
                    status["dashboardURL"] = f"{service}.{meta['namespace']}.svc.cluster.local:8265"
                    interactive = spec.get("submissionMode") == "InteractiveMode"
                    status["jobDeploymentStatus"] = "Waiting" if interactive else "Running"
            elif phase == "Waiting" and spec.get("jobId"):
                status |= {"jobId": spec["jobId"], "jobDeploymentStatus": "Running"}
            elif phase == "Running":
                await self._look(cluster, status)
        elif phase in ("Complete", "Failed") and not spec.get("clusterSelector"):
            self._clean_up(job, status)

    def _too_late(self, spec: Object, status: Object, phase: str) -> bool:
        age = time.time() - _seconds(status["startTime"])
        checks = [("preRunningDeadlineSeconds", "PreRunningDeadlineExceeded", ("Initializing", "Waiting"))]
        checks.insert(0, ("activeDeadlineSeconds", "DeadlineExceeded", ("Initializing", "Running")))
        for key, reason, phases in checks:
            if spec.get(key) and phase in phases and age >= spec[key]:
                label = key[0].upper() + key[1:]
                words = (
                    f"The RayJob has passed the {key}. StartTime: {status['startTime']}. {label}: {spec[key]}"
                )
                _failed(status, reason, words)
                return True
        return False

    def _cluster_of(self, job: Object, status: Object) -> Object | None:
        meta, spec, name = job["metadata"], job["spec"], status["rayClusterName"]
        found = self.store.find("rayclusters", meta["namespace"], name)
        if found is not None:
            return found
        if spec.get("clusterSelector"):
            words = f"RayCluster {meta['namespace']}/{name} set in the clusterSelector is not found. It must be created manually"
            self._event(job, "Warning", "RayClusterNotFound", words)
            return None
        labels = {
            **(meta.get("labels") or {}), "ray.io/originated-from-cr-name": meta["name"],
            "ray.io/originated-from-crd": "RayJob", "ray.io/job-submission-mode": spec.get("submissionMode", ""),
        }  # fmt: skip
        named = {"name": name, "labels": labels, "annotations": dict(meta.get("annotations") or {})}
        try:
            self._make(CLUSTERS, job, {"metadata": named, "spec": copy.deepcopy(spec["rayClusterSpec"])})
        except Refused as refused:
            words = f"Failed to create RayCluster {meta['namespace']}/{name}: {refused.message}"
            self._event(job, "Warning", "FailedToCreateRayCluster", words)
            return None
        self._event(job, "Normal", "CreatedRayCluster", f"Created RayCluster {meta['namespace']}/{name}")
        return self.store.find("rayclusters", meta["namespace"], name)

    async def _look(self, cluster: Object, status: Object) -> None:
        """What Ray says of the job."""
        info = await self.dashboard(cluster, "GET", f"/api/jobs/{status.get('jobId')}")
        if info is None:
            return
        status["rayClusterStatus"] = copy.deepcopy(cluster.get("status") or {})
        status |= {"jobStatus": info["status"], "message": info.get("message") or ""}
        times = {"startTime": info.get("start_time"), "endTime": info.get("end_time")}
        status["rayJobInfo"] = {k: _stamp(v / 1000) for k, v in times.items() if v}
        if info["status"] in ENDED:
            status |= {"jobDeploymentStatus": "Complete", "endTime": now()}
            if info["status"] == "FAILED":
                _failed(status, "AppFailed", status["message"])
            elif info["status"] == "SUCCEEDED":
                status["succeeded"] = status.get("succeeded", 0) + 1

    def _clean_up(self, job: Object, status: Object) -> None:
        spec, meta = job["spec"], job["metadata"]
        due = time.time() - _seconds(status.get("endTime") or now())
        policy = "DeleteCluster" if spec.get("shutdownAfterJobFinishes") else ""
        ttl = spec.get("ttlSecondsAfterFinished", 0)
        for rule in (spec.get("deletionStrategy") or {}).get("deletionRules") or []:
            when = rule["condition"]
            matched = when.get("jobStatus") == status.get("jobStatus") or (
                when.get("jobDeploymentStatus") == status["jobDeploymentStatus"]
            )
            if matched and due >= when.get("ttlSeconds", 0):
                policy, ttl = rule["policy"], when.get("ttlSeconds", 0)
        if not policy or due < ttl:
            return
        name, space = status["rayClusterName"], meta["namespace"]
        cluster = self.store.find("rayclusters", space, name)
        if policy == "DeleteSelf":
            self.store.delete(JOBS, space, meta["name"], "Background")
        elif policy == "DeleteCluster" and cluster and "deletionTimestamp" not in cluster["metadata"]:
            self.store.delete(CLUSTERS, space, name, "Background")
            self._event(job, "Normal", "DeletedRayCluster", f"Deleted cluster {space}/{name}")
        elif policy == "DeleteWorkers" and cluster:
            for group in cluster["spec"].get("workerGroupSpecs") or []:
                if not group.get("suspend"):
                    group["suspend"] = True
                    cluster["metadata"]["generation"] += 1
                    self.store.touch("rayclusters", cluster)

    async def _stop(self, job: Object) -> None:
        status = job.get("status") or {}
        if status.get("jobStatus") in ENDED or not status.get("jobId"):
            return
        name = status.get("rayClusterName", "")
        if cluster := self.store.find("rayclusters", job["metadata"]["namespace"], name):
            await self.dashboard(cluster, "POST", f"/api/jobs/{status['jobId']}/stop")

    async def dashboard(self, cluster: Object, method: str, path: str) -> Any:
        """What the head answers, or None when it does not."""
        meta = cluster["metadata"]
        head = self.kubelet.head_of(meta["namespace"], meta["name"])
        if head is None or not head.up:
            return None
        if head.fake:
            return stub.job(head, method, path)
        if head.block is None:
            return None
        secret = self.store.find("secrets", meta["namespace"], token_secret(cluster)) or {}
        token = base64.b64decode((secret.get("data") or {}).get("auth_token", "")).decode()
        headers = {"x-ray-authorization": f"Bearer {token}"} if token else {}
        url = f"http://{head.ip}:{head.block.ports['dashboard']}{path}"
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                async with session.request(method, url, headers=headers) as answer:
                    return json.loads(await answer.text()) if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
            return None


def _failed(status: Object, reason: str, message: str) -> None:
    status |= {"jobDeploymentStatus": "Failed", "reason": reason, "message": message, "endTime": now()}
    status["failed"] = status.get("failed", 0) + 1


def _seconds(stamp: str) -> float:
    return calendar.timegm(time.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ"))


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
