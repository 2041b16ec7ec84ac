"""What every benchmark records beside its figures, and how it times."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import kvbits

RESULTS = Path(__file__).parent / "results"
SEED = 0


def setting() -> dict[str, Any]:
    """Hardware, versions, seed and date."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor,
        "cores": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvbits": kvbits.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "seed": SEED,
        "command": " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *(Path(a).name for a in sys.argv[1:])]),
    }


def write(name: str, rows: list[dict[str, Any]], **more: Any) -> Path:
    """Write ``bench/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"setting": setting(), **more, "rows": rows}, indent=1) + "\n")
    return path


def split(schemes: str) -> list[str]:
    """Schemes separated by semicolons, or by commas where none has an option."""
    return schemes.split(";" if ";" in schemes else ",")


def require_green(*tests: str) -> None:
    """Refuse to measure what is wrong: run these test files first, and end the program if one fails."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(tests)}: a test fails, so nothing is measured\n{done.stdout[-2000:]}")


def prose(characters: int) -> str:
    """Real English from Python's own help topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics) if len(topics[name]) > 2000)[:characters]
