"""What the API page needs of griffe: the options of `LLM` with their types and defaults.

They are declared as a TypedDict, which griffe shows as `**options`.
"""

import ast
from typing import Any

from griffe import Extension, Module, Parameter, ParameterKind


class LLMOptions(Extension):
    """Lists the options one by one."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Replace `**options` of `LLM` by what stands for it."""
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
