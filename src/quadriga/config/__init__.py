"""The settings: what there is, how it is loaded, and how it is checked.

    schema      `quadriga train`: all sections as frozen dataclasses, with defaults and ranges
    commands    the settings of the other commands
    loading     `load_config`: defaults, then a YAML file, then overrides `key=value`; `to_yaml`
    convert     plain values → dataclasses, with strict types, ranges and "did you mean", and the
                text of `--help`
    secrets     what is masked in settings, logs and errors
    paths       `~` at the beginning of a path; which paths may be remote
    stores      remote files and folders: sent, read and compared
    role_ranks  which ranks each role uses
    plan        the batch arithmetic of a run

Import names from the modules: `quadriga.config.schema` loads no library, `quadriga.config.loading`
loads hydra and pydantic.
"""
