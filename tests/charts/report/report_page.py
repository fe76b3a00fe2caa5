"""Pages of `phasor report`, parsed, and a model to write one about."""

import html.parser
import json
from functools import cache

import phasor
from phasor import preset
from phasor.charts import report


class Page(html.parser.HTMLParser):
    """Tags with their attributes in order, the text of each, and the JSON of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.scripts, self.open = [], {}, {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if not self.open:
            return
        tag, attributes = self.open[-1]
        if tag == "script" and attributes.get("type") == "application/json":
            self.scripts[attributes["id"]] = json.loads(data)
        elif tag != "script":
            self.texts.setdefault(tag, []).append(data)

    def all(self, tag):
        """The attributes of each such tag."""
        return [attributes for name, attributes in self.tags if name == tag]

    def rows(self, chart):
        """The largest data set of a chart."""
        spec = self.scripts[f"rope-0-{chart}"]
        found = [*spec.get("datasets", {}).values()]
        found += [part["data"]["values"] for part in [spec, *spec.get("layer", [])]
                  if "values" in part.get("data", {})]  # fmt: skip
        return max(found, key=len)


@cache
def llama_3():
    """The page of Llama 3, made once."""
    return report(preset("llama-3-8b"))


def toy(rope, **more):
    """A model of two layers."""
    given = {"name": "toy", "layer_kinds": ("rope",) * 2, "kinds": {"rope": rope}, "context": 64}
    return phasor.LayerRopes(**given | more)
