"""What plugs into a training framework is imported, and its page is run, where that framework is installed."""

from importlib.util import find_spec

MODULES = {"trl": ("trl",), "verl": ("verl", "verl_config", "verl_v1")}

collect_ignore = [
    path
    for name, modules in MODULES.items()
    if find_spec(name) is None
    for path in (*(f"miles_norm/integrations/{module}.py" for module in modules), f"docs/integrations/{name}.md")
]
