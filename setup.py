import platform
import sys

from setuptools import find_packages, setup

if sys.version_info < (3, 11):  # pip tells of conflicting dependencies instead
    sys.exit(
        f"Python {platform.python_version()} ({sys.executable}) is too old: rl-sa2va needs 3.11 or "
        "newer; use another one (apt install python3.11-venv, uv python install 3.11, or conda "
        "create -n rl python=3.11)"
    )

setup(
    name="rl-sa2va",
    version="0.1.0",
    description="Reinforcement learning of Sa2VA by closed mask-caption cycles",
    license="Apache-2.0",
    # Not `tools`: its commands are run in the checkout, `python -m tools.NAME`.
    packages=find_packages(include=["rl_train*", "sa2va_hf*"]),
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.8",
        "transformers>=5.17",
        "peft>=0.21",
        "numpy",
        "pillow",
        "pycocotools",
        "nltk",
        "tqdm",
        "tensorboard",
        "protobuf",
        "pyarrow",
        "safetensors",
        "huggingface_hub",
        "jinja2",
        "pyyaml",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "datasets",
            "openai",
            "inflect",
            "matplotlib",
        ],
        "oracle": ["trl==1.16.0", "pytest", "datasets", "pycocoevalcap"],
        "judge": ["openai"],
        "wandb": ["wandb"],
        "app": ["gradio>=5"],
        "quantize": ["bitsandbytes>=0.50"],
        "eval": ["inflect"],
    },
)
