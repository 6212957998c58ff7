"""Whatever starts a server, a router or `sglang-scout` in documents and deploy files is parsed by the program's own
parser; the deploy files by their tools and schemas, where these need no daemon and no cluster."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from command_lines import of_shell, parsed, program
from sglang_scout.core.flags import ADAPTERS

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "docs" / "deploy"


def of_compose(path: Path, **variables: str):
    text = re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda x: variables.get(x[1], x[2]), path.read_text())
    services = yaml.safe_load(text)["services"].values()
    return [shlex.split(x["command"]) for x in services if "command" in x]


def kubernetes():
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def pods():
    templates = [x["spec"]["template"] for x in kubernetes() if x["kind"] == "Deployment"]
    return [(x["metadata"]["labels"], x["spec"]["containers"][0]) for x in templates]


def commands() -> dict[str, tuple[str, list[str]]]:
    compose = DEPLOY / "compose.yaml"
    lines = {
        DEPLOY / "slurm.sh": of_shell((DEPLOY / "slurm.sh").read_text()),
        compose: of_compose(compose) + of_compose(compose, DEVICE="cuda"),
        DEPLOY / "kubernetes.yaml": [pod["args"] for _, pod in pods()],
    }
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), re.DOTALL)
        lines[page] = of_shell("\n".join(blocks))
    return {
        f"{path.relative_to(ROOT)}:{i}": one
        for path, all_words in lines.items()
        for i, words in enumerate(all_words)
        if (one := program(words))
    }


COMMANDS = commands()


@pytest.fixture(scope="module")
def outcome(tiny_model, tmp_path_factory):
    return parsed(COMMANDS, tiny_model("qwen3"), tmp_path_factory.mktemp("parsed"))


@pytest.mark.parametrize("place", COMMANDS)
def test_the_programs_own_parser_takes_it(outcome, place):
    found, said = outcome
    assert not found[place], f"{COMMANDS[place]}: {found[place]}\n{said[-2000:]}"


def test_commands_are_found():
    places = {place.rpartition(":")[0].removeprefix("docs/deploy/") for place in COMMANDS}
    wanted = "README.md docs/tutorial.md compose.yaml kubernetes.yaml slurm.sh"
    assert set(wanted.split()) <= places
    assert {name for name, _ in COMMANDS.values()} == {"server", "router", "scout"}


def test_compose_files_are_taken():
    command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    if subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip("no docker compose")
    for device, more in (("cpu", []), ("cuda", ["-f", DEPLOY / "compose.cuda.yaml"])):
        words = [*command, "-f", DEPLOY / "compose.yaml", *more, "config"]
        environment = os.environ | {"MODEL": "/m", "DEVICE": device}
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        services = yaml.safe_load(done.stdout)["services"]
        assert services["decode"]["image"] == f"sglang-scout:{device}"
        assert ("deploy" in services["prefill"]) == (device == "cuda")
        for mount in (x for s in services.values() for x in s.get("volumes", ())):
            source = mount.split(":")[0] if isinstance(mount, str) else mount["source"]
            assert source == "/m" or Path(source).is_file(), mount


def test_the_manifests_are_of_the_schema():
    import kubernetes_validate

    documents = kubernetes()
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    selectors = [x["spec"]["selector"] for x in documents if x["kind"] in ("Deployment", "Service")]
    for selector in (x.get("matchLabels", x) for x in selectors):
        assert any(selector.items() <= labels.items() for labels, _ in pods()), selector
    for _, pod in pods():
        probes = [probe for key, probe in pod.items() if key.endswith("Probe")]
        for probe in probes:  # a server's /health takes a second at least, and up to 20
            assert probe["httpGet"]["path"] != "/health" or probe["timeoutSeconds"] > 20
        asked = {probe["httpGet"]["port"] for probe in probes}
        assert asked == {int(x.split("=")[1]) for x in pod["args"] if x.startswith("--port=")}


def test_the_dockerfile_has_no_faults():
    file = DEPLOY / "Dockerfile"
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, file], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout
    text = file.read_text()
    for words in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / word).exists() for word in words.split())
    assert re.search(r"^ARG SGLANG=(.*)$", text, re.MULTILINE)[1] in ADAPTERS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_prometheus_takes_its_file(tmp_path):
    for file in (DEPLOY / "prometheus.yml", ROOT / "docs" / "monitoring" / "alerts.yml"):
        shutil.copy(file, tmp_path)
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True)
