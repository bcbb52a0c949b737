"""Checks the Kubernetes manifests as a cluster would read them. Usage: manifests_test.py ROOT TOOLS

TOOLS is a virtual environment with kubernetes-validate, and kubectl beside it (deploy/install_deps.sh test makes it). The test
renders the base and each overlay, validates the result with the API's schemas, and checks what schemas can't express. Status
77 without the tools.
"""

import os
import pathlib
import re
import subprocess
import sys

VERSIONS = ("1.34", "1.37")  # resource.k8s.io/v1 is new in 1.34


def restricted_violations(pod):
    """What the pod security standard `restricted` would refuse."""
    found = []
    context = pod.get("securityContext", {})
    if not context.get("runAsNonRoot") or context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("the pod needs runAsNonRoot and seccompProfile RuntimeDefault")
    found += [f"{key} is not allowed" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    found += [f"volume {v['name']}: hostPath is not allowed" for v in pod.get("volumes", []) if "hostPath" in v]
    for container in pod.get("initContainers", []) + pod.get("containers", []):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities", {}).get("drop") != ["ALL"]:
            found.append(f"{container['name']}: needs allowPrivilegeEscalation: false and drop: [ALL]")
        if not own.get("readOnlyRootFilesystem"):
            found.append(f"{container['name']}: root file system is writable")
    return found


def sidecar_violations(pod):
    """The daemon must be a native sidecar that the engine waits for; both see its sockets, and all that is mounted exists."""
    found = []
    daemon = next((c for c in pod.get("initContainers", []) if c["name"] == "kvpoold"), None)
    if daemon is None or daemon.get("restartPolicy") != "Always" or "startupProbe" not in daemon:
        return ["kvpoold is not an initContainer with restartPolicy Always and a startupProbe"]
    if "metrics" not in [port.get("name") for port in daemon.get("ports", [])]:
        found.append("kvpoold has no port named metrics, which the PodMonitor asks for")
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in [daemon, *pod["containers"]]:
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        if "/run/kvpool" not in mounts:
            found.append(f"{container['name']}: the sockets' folder is not mounted")
        found += [f"{container['name']}: no volume {name}" for name in mounts.values() if name not in volumes]
    claims = {claim["name"] for claim in pod.get("resourceClaims", [])}
    for container in [daemon, *pod["containers"]]:
        used = {claim["name"] for claim in container.get("resources", {}).get("claims", [])}
        if used != claims:
            found.append(f"{container['name']}: uses the claims {sorted(used)}, the pod has {sorted(claims)}")
    return found


# The command of each probe. A failed startup or liveness probe ends the container, and a draining daemon still has sessions to wait for.
PROBES = {
    "startupProbe": ["kvpoolctl", "health", "--live"],
    "livenessProbe": ["kvpoolctl", "health", "--live"],
    "readinessProbe": ["kvpoolctl", "health"],
}


def probe_violations(pod):
    daemon = next((c for c in pod.get("initContainers", []) if c["name"] == "kvpoold"), {})
    asked = {probe: daemon.get(probe, {}).get("exec", {}).get("command") for probe in PROBES}
    return [f"{probe} asks {asked[probe]}, not {command}" for probe, command in PROBES.items() if asked[probe] != command]


def pod_monitor_violations(monitor, labels, pod):
    """The part of monitoring.coreos.com/v1 PodMonitor that is used here, and that it asks as the daemon answers."""
    spec = monitor["spec"]
    daemon = next((c for c in pod.get("initContainers", []) if c["name"] == "kvpoold"), {})
    flags = {word.split("=")[0] for word in daemon.get("args", [])}
    tls = {"--metrics-tls-cert": "serverName", "--metrics-tls-key": "ca", "--metrics-tls-client-ca": "cert"}
    wrong = []
    for endpoint in spec["podMetricsEndpoints"]:
        config = endpoint.get("tlsConfig", {})
        if {flag for flag, key in tls.items() if key in config} != flags & tls.keys() or (endpoint.get("scheme") == "https") != bool(config):
            wrong.append(f"PodMonitor asks by {endpoint.get('scheme', 'http')} with {sorted(config)}, kvpoold has {sorted(flags & tls.keys())}")
        wrong += [f"PodMonitor: unknown field tlsConfig.{key}" for key in config if key not in ("ca", "cert", "keySecret", "serverName")]
    selected = spec["selector"]["matchLabels"].items() <= labels.items()
    return wrong + ([] if selected else ["PodMonitor selects no pod"]) + [
        f"PodMonitor: unknown field {key}" for key in spec if key not in ("selector", "podMetricsEndpoints")] + [
            f"PodMonitor: unknown field {key}" for endpoint in spec["podMetricsEndpoints"] for key in endpoint
            if key not in ("port", "interval", "scrapeTimeout", "honorLabels", "relabelings", "metricRelabelings", "scheme", "tlsConfig")]


def flag_violations(root, pod):
    """Arguments of our programs, in probes too, are flags that they define."""
    found = []
    for container in pod.get("initContainers", []) + pod["containers"]:
        probes = [container[probe]["exec"]["command"] for probe in PROBES if probe in container]
        for command in [container.get("command", ["kvpoold"]) + container.get("args", []), *probes]:
            folder = "server" if command[0] == "kvpoold" else "client"
            source = "\n".join(path.read_text(encoding="utf-8") for path in (root / folder).rglob("*.cc"))
            for flag in (word.split("=")[0][2:] for word in command[1:] if word.startswith("--")):
                if not re.search(rf'Add\w*\(\s*"{re.escape(flag)}"', source):
                    found.append(f"{container['name']}: {command[0]} has no flag --{flag}")
    return found


def check(root, kubectl, kubernetes_validate, yaml, folder):
    rendered = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    if rendered.returncode != 0:
        return [rendered.stderr.strip()]
    objects = list(yaml.safe_load_all(rendered.stdout))
    found, labels, pod = [], {}, {}
    for item in objects:
        if item["kind"] == "PodMonitor":  # a custom resource: the API has no schema of it
            continue
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(item, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{item['kind']} against {version}: {error.message}")
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            labels = item["spec"]["template"]["metadata"]["labels"]
            found += (restricted_violations(pod) + sidecar_violations(pod) + probe_violations(pod) +
                      flag_violations(root, pod))
    for item in objects:
        if item["kind"] == "PodMonitor":
            found += pod_monitor_violations(item, labels, pod)
    print(f"{folder.relative_to(root)}: {', '.join(item['kind'] for item in objects)}: {len(found)} things wrong")
    return [f"{folder.relative_to(root)}: {message}" for message in found]


def main(root, tools):
    kubectl, python = tools / "kubectl", tools / "bin/python"
    if not kubectl.exists():
        print("kubectl and kubernetes-validate are not installed")
        return 77
    if pathlib.Path(sys.prefix) != tools:  # under the interpreter that has the packages
        os.execv(python, [str(python), "-B", *sys.argv])
    import kubernetes_validate
    import yaml
    kubernetes = root / "deploy/kubernetes"
    found = []
    for folder in [kubernetes / "base", *sorted((kubernetes / "overlays").iterdir())]:
        found += check(root, kubectl, kubernetes_validate, yaml, folder)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()))
