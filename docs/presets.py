"""Write src/kvbits/plan/presets.json: the shapes of the presets, from their configs (a minute).

python docs/presets.py
"""

from __future__ import annotations

import json
from dataclasses import replace

from kvbits.plan.models import config_of_dict, shape_of_config, unrotatable
from kvbits.plan.presets import PRESETS, SHAPES
from kvbits.plan.shapes import to_json


def main() -> None:
    shapes = {}
    for name, preset in PRESETS.items():
        config = config_of_dict(preset.config, preset.title)
        shape = shape_of_config(config, name, source=f"preset with the sizes of {preset.hub}")
        shapes[name] = to_json(replace(shape, unrotatable=unrotatable(config)))
        print(name)
    lines = [f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items()]
    SHAPES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
