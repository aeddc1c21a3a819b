"""What plainrl needs, and what each dependency saves us from writing."""
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent

CORE = [
    # Tensors, gradients and optimizers. Nothing newer than what the tests ran with: a new minor
    # release may change the numbers of a seed.
    "torch>=2.11,<2.14",
    # The environments, their vectors, episode statistics and the video recorder.
    "gymnasium[mujoco]>=1.4,<2",
    "mujoco>=3,<5",         # the physics of HalfCheetah and its kin; gymnasium admits any newer one
    "numpy",                # observations and actions, as the environments speak them
    "mpi4py",               # a sum over processes in one call, on one machine or a cluster
    # mpiexec and the MPI library as a wheel: no system package to install. Windows has no such
    # wheel, and runs one process.
    "mpich; sys_platform != 'win32'",
    "matplotlib",           # learning curves
    "scipy",                # bootstrap confidence intervals
    "tyro",                 # a command line from a dataclass: flags, types, help, nearest flag
    "tqdm",                 # the progress bar with its time left
    "tensorboard",          # TensorBoard's event files, and the page that shows them
    "jaxtyping",            # shapes in the signatures, checked by the tests
]

ATARI = ["ale-py"]                      # the Atari games, preprocessed in C++
BOX2D = ["gymnasium[box2d]>=1.4,<2"]    # LunarLander, BipedalWalker, CarRacing
VIDEO = ["moviepy", "pygame"]           # an mp4 of recorded frames; draws classic control

TEST = [
    *ATARI, *BOX2D, *VIDEO,
    "pytest",
    "pytest-xdist",         # tests on both cores
    "pytest-timeout",       # a hang (two ranks that wait for each other) fails, with its stack
    "beartype",             # the checker behind jaxtyping's import hook
    "ruff",
    "nbclient",             # runs the notebooks from top to bottom
    "ipykernel",            # the kernel that it runs them in
    "stable-baselines3",    # an independent reference for losses and gradients
    "sb3-contrib",          # the same for the algorithms that stable-baselines3 lacks
]

setup(
    name="plainrl",
    version="0.1.0",
    description="Deep reinforcement learning, one readable file an algorithm",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    packages=["algos", "utils"],
    # Modules that stand beside setup.py; one that is not there would break the build.
    py_modules=[name for name in ["plot"] if (HERE / f"{name}.py").exists()],
    install_requires=CORE,
    extras_require={"atari": ATARI, "box2d": BOX2D, "video": VIDEO, "test": TEST},
)
