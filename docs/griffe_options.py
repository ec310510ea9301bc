"""Shows the options of `LLM` on the API page, with their types and defaults.

They are declared as a TypedDict, which griffe would show as `**options`.
"""

import ast
from typing import Any

from griffe import Extension, Module, Parameter, ParameterKind


class LLMOptions(Extension):
    """Lists each option."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Replace `**options` of `LLM` with its options."""
        if pkg.name != "specjax":
            return
        declared = pkg["serving.options"]
        defaults = ast.literal_eval(str(declared["DEFAULTS"].value))
        parameters = pkg["llm.LLM.__init__"].parameters
        del parameters["options"]
        for name, option in declared["LLMOptions"].attributes.items():
            parameters.add(
                Parameter(
                    name,
                    annotation=option.annotation,
                    kind=ParameterKind.keyword_only,
                    default=repr(defaults[name]),
                )
            )
