# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
import re
from pathlib import Path

from setuptools import find_packages, setup


here = Path(__file__).parent
version = re.search(r'^__version__ = "([^"]+)"', (here / "src/d3pm_hf/__init__.py").read_text(), re.MULTILINE).group(1)
repository = "https://github.com/d3pm-hf/d3pm-hf"

# Lower bounds: the oldest versions that were tried. constraints-lowest.txt holds them, constraints.txt what the tests run with.
install_requires = [
    "torch>=2.9",
    "diffusers>=0.42.0",
    "transformers>=5.20.0",
    "accelerate>=1.15.0",
    "tokenizers>=0.23.1",
    "pillow>=10.1",
    "jinja2",
    "huggingface_hub>=1.32.0",
    "safetensors>=0.8.0",
    "numpy",
    "scipy",
    "tqdm",
    "filelock>=4.0.0",
]

extras = {
    "training": ["datasets>=4.0.0", "protobuf", "tensorboard"],
    "evaluation": ["evaluate>=0.4.6", "torchmetrics>=1.9.0"],
    "lora": ["peft>=0.21.2"],
    "demo": ["matplotlib", "networkx", "rdkit", "scikit-learn"],
    "test": ["pytest", "pytest-xdist", "hypothesis"],
    "quality": ["mypy", "ruff"],
    "lm-eval": ["lm_eval>=0.4.13"],
    "docs": ["sphinx>=8.2", "myst-parser>=5.0", "furo", "ruff"],
}
extras["dev"] = sorted({name for extra in extras.values() for name in extra})
# The page to play with, and a browser to test it in, are installed by `make app` and `make test-browser` alone.
extras["app"] = ["gradio>=6.31"]
extras["browser"] = ["playwright"]

setup(
    name="d3pm-hf",
    version=version,
    description="Discrete denoising diffusion (D3PM) in the HuggingFace style",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The d3pm-hf authors",
    url=repository,
    project_urls={
        "Documentation": f"{repository}/tree/main/docs/source/en",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Security": f"{repository}/blob/main/SECURITY.md",
    },
    license="Apache-2.0",
    keywords="diffusion discrete-diffusion d3pm generative-models diffusers pytorch",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"d3pm_hf": ["py.typed"]},
    include_package_data=True,
    python_requires=">=3.11",
    install_requires=install_requires,
    extras_require=extras,
    # Read by `lm_eval --model d3pm` of versions after 0.4.13.
    entry_points={"lm_eval.models": ["d3pm = d3pm_hf.evaluation.lm_harness:D3PMHarnessModel"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
)
