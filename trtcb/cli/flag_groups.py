"""Flags that several commands share: a group is a dataclass, and a command takes it as one parameter."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer.core


def with_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Show the fields of each parameter that is a dataclass as flags of the command.

    Fields are declared as a command's own parameters are, ``Annotated[type, typer.Option(...)] = default``. The group's
    ``title`` is their heading in a :class:`GroupedCommand`'s help.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        for flag in _fields(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]:
            parameters[flag.name] = flag.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(command)
    def expanded(**values: Any) -> None:
        made = {
            name: group(**{flag.name: values.pop(flag.name) for flag in _fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    expanded.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    expanded.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return expanded


class GroupedCommand(typer.core.TyperCommand):
    """A command whose plain help lists its flags under the headings of their groups, its own under "Options"."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section a group, in the order of the flags."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                title = getattr(parameter, "rich_help_panel", None) or "Options"
                if parameter.param_type_name == "argument":
                    title = "Arguments"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _fields(group: Any) -> list[inspect.Parameter]:
    """Return a group's flags as parameters of a command."""
    hints = get_type_hints(group, include_extras=True)
    flags = []
    for parameter in inspect.signature(group).parameters.values():
        hint = hints[parameter.name]
        for info in getattr(hint, "__metadata__", ()):
            info.rich_help_panel = group.title
        flags.append(parameter.replace(annotation=hint))
    return flags
