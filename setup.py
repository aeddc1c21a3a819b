"""Package metadata and dependencies; a comment says what each dependency is for."""
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

CORE = [
    # Tensors, gradients and optimizers. The tests run with 2.13, and once ran with 2.15; a newer
    # one may change the results of a seed.
    "torch>=2.11,<2.16",
    # Environments, vector environments and episode statistics.
    "gymnasium[mujoco]>=1.4,<2",
    "mujoco>=3,<5",         # physics of HalfCheetah and others; gymnasium sets no upper bound
    "numpy>=2",             # arrays of observations and actions; NumPy 1 rounds scalars otherwise
    "mpi4py",               # sums over processes, on one machine or a cluster
    # mpiexec and the MPI library as a wheel, so no system package is needed. There is no wheel for
    # Windows, where runs use one process.
    "mpich; sys_platform != 'win32'",
    "matplotlib",           # learning curves
    "scipy",                # bootstrap confidence intervals
    "tyro>=1,<2",           # makes flags and --help of a dataclass, so no parser of ours has to
    "tqdm",                 # progress bar with the time left
    "tensorboard",          # writes event files, and shows them in a browser
    "jaxtyping",            # shapes in signatures, which the tests check
]

ATARI = ["ale-py"]                      # Atari games with preprocessing in C++
MINATAR = ["minatar"]                   # five Atari games in 10 x 10 pixels
BOX2D = ["gymnasium[box2d]>=1.4,<2"]    # LunarLander, BipedalWalker, CarRacing
# imageio writes .mp4 files by an FFmpeg that it brings, and .gif files, so no pipe of ours has to.
# pygame-ce draws classic control. Gymnasium's extras need it too; pygame has the same files.
VIDEO = ["imageio[ffmpeg]", "pygame-ce"]
ROBOTICS = ["gymnasium-robotics"]       # FetchReach, PointMaze and other environments with goals
# The reading site: python -m docs
DOCS = [
    "sphinx",               # pages, navigation and a search that needs no server
    "furo",                 # a theme with dark mode, phone width and keyboard use
    "myst-nb",              # Markdown and notebooks as Sphinx pages
    "latex2mathml",         # LaTeX -> MathML, which browsers draw without a script
    "ziamath",              # brings the font STIX Two Math, so that no page fetches one
]
# play --export: PyTorch records the graph of a policy, and onnxscript writes it with the operators
# of ONNX, so no converter of ours has to. It brings onnx, the file format.
EXPORT = [
    "onnxscript",
    "onnxruntime",          # runs the graph, so the tests can compare it with `predict`
]
BENCH = ["sbx-rl", "sb3-contrib"]       # peers that benchmarks/speed.py times

TEST = [
    *ATARI, *MINATAR, *BOX2D, *VIDEO, *ROBOTICS, *DOCS, *EXPORT,
    "pytest",
    "pytest-xdist",         # runs tests in parallel
    "pytest-timeout",       # fails a test that hangs, and prints its stack
    "beartype",             # type checker behind jaxtyping's import hook
    "ruff",
    "nbclient",             # runs the notebooks
    "ipykernel",            # the kernel in which nbclient runs them
    "stable-baselines3",    # independent reference for losses and gradients
    "sb3-contrib",          # the same for algorithms that stable-baselines3 lacks
    "hypothesis",           # random inputs and call sequences: recursions, buffers, configurations
]

setup(
    name="plainrl",
    version="0.1.0",
    description="Deep reinforcement learning, one readable file per algorithm",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",       # the tests run with 3.11, and once ran with 3.13
    packages=find_packages(include=["algos", "utils", "utils.*", "diagnose"]),
    package_data={"diagnose": ["doctor.jsonl", "bugs/*.toml"]},
    py_modules=["plot", "tasks"],
    install_requires=CORE,
    extras_require={"atari": ATARI, "minatar": MINATAR, "box2d": BOX2D, "video": VIDEO,
                    "robotics": ROBOTICS, "docs": DOCS, "export": EXPORT,
                    "bench": BENCH, "test": TEST},
)
