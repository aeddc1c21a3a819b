"""Two hosts: network namespaces with a name each, on one machine. Slow, and only for root.

They share the file system, but for what a test mounts over it on the second host.
"""
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, rows, run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))),
    reason="needs Linux, root, ip and unshare for hosts of its own")]

HOSTS = "plain1", "plain2"
# Hydra calls it as it would call ssh: [flags] host command...
LAUNCHER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
[ $host = plain2 ] && setup=$SECOND
exec ip netns exec $host unshare --uts --ipc --mount sh -c "hostname $host; $setup $*"
"""
# A file system that tells for half a minute that something is missing which it once looked for.
CACHING = """
import builtins, functools, io, os, time

missing = {}

def caching(call):
    @functools.wraps(call)
    def wrapped(path, *args, **more):
        name = os.path.abspath(path) if isinstance(path, str | os.PathLike) else ""
        if any((name + "/").startswith(gone + "/") for gone, since in missing.items()
               if time.time() < since + 30):
            raise FileNotFoundError(2, "No such file or directory", name)
        try:
            return call(path, *args, **more)
        except FileNotFoundError:
            missing[name] = time.time()
            raise
    return wrapped

os.stat, os.scandir, os.listdir = map(caching, (os.stat, os.scandir, os.listdir))
builtins.open = io.open = caching(io.open)
"""


@pytest.fixture(scope="module")
def hosts():
    """Two network namespaces on a bridge of this machine."""
    commands = ["link add plainbr type bridge", "addr add 10.77.0.254/24 dev plainbr",
                "link set plainbr up"]
    for k, host in enumerate(HOSTS, 1):
        commands += [f"netns add {host}", f"link add plain-v{k} type veth peer eth0 netns {host}",
                     f"link set plain-v{k} master plainbr up",
                     f"-n {host} addr add 10.77.0.{k}/24 dev eth0",
                     f"-n {host} link set eth0 up", f"-n {host} link set lo up"]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield
    finally:
        for command in ("netns del plain1", "netns del plain2", "link del plainbr"):
            subprocess.run(["ip", *command.split()], stderr=subprocess.DEVNULL)


@pytest.fixture
def train(hosts, tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)

    def train(run_dir, *words, second="", hosts=True):
        """Train on both hosts, after the command `second` on the second one, or on this machine.

        Return what was printed.
        """
        mpi = [Path(sys.executable).with_name("mpiexec"), "-launcher", "ssh", "-launcher-exec",
               launcher, "-localhost", "10.77.0.254", "-hosts", ",".join(HOSTS), "-n", "2"]
        command = [*(mpi if hosts else []), sys.executable, "-m", "algos.ppo", "--env",
                   "CartPole-v1", "--num-envs", "2", "--rollout-steps", "256", *words, "--run-dir",
                   run_dir, *([] if hosts else ["--num-procs", "2"])]
        env = os.environ | {"SECOND": f"{second};" * bool(second), "OMP_NUM_THREADS": "1"}
        return run(command, cwd=ROOT, env=env).stdout
    return train


def test_two_hosts_compute_what_one_does_and_resume(train, tmp_path):
    """The resume is the command that a refusal to overwrite prints."""
    for folder, on in (("two", True), ("one", False)):
        train(tmp_path / folder, "--total-steps", "1024", hosts=on)
    assert rows(tmp_path / "two") == rows(tmp_path / "one")
    said = train(tmp_path / "two", "--total-steps", "2048", "--resume")
    assert "from step 1,024" in said


def test_a_file_system_that_caches_what_is_missing(train, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CACHING)
    second = f"export PYTHONPATH={shlex.quote(str(tmp_path))}"
    for more in (["--total-steps", "1024"], ["--total-steps", "2048", "--resume"]):
        train(tmp_path / "run", *more, second=second)
