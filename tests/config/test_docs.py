"""The list of keys in docs/configuration.md is that of the schema. Run as a script, this file rewrites it."""

import re
from pathlib import Path

from torchtitan_lite.config.fields import KEYS, SECTIONS, spell
from torchtitan_lite.config.help import describe, field_docs, value_of
from torchtitan_lite.config.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KEYS_IN_PAGE = re.compile(r"(?<=from the schema -->\n)(.*)(?=<!-- end of keys -->)", re.S)


def tables() -> str:
    """One Markdown table a section: key, what it takes, default, meaning."""
    lines = []
    for section in SECTIONS:
        lines += [f"\n### [{section}]\n", "| key | takes | default | meaning |", "|---|---|---|---|"]
        for name, key in KEYS.items():
            if name.rpartition(".")[0] == section:
                default = spell(value_of(Config(), name))
                rows = [(f"`{name}`", describe(key), f"`{default}`", field_docs()[name])]
                for item in key.item_keys.values():
                    default = spell(getattr(key.item(), item.name))
                    meaning = field_docs()[f"{name}[].{item.name}"]
                    rows.append((f"`{name}[].{item.name}`", describe(item), f"`{default}`", meaning))
                lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join(lines) + "\n\n"


def test_the_page_lists_every_key_as_it_is():
    listed = KEYS_IN_PAGE.search(PAGE.read_text(encoding="utf-8"))[0]
    assert listed == tables(), "run this file as a script to rewrite the list"


if __name__ == "__main__":
    PAGE.write_text(KEYS_IN_PAGE.sub(lambda _: tables(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
