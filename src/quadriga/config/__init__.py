"""The settings: their schema, how they are loaded, and how they are checked.

    schema         all settings as frozen dataclasses, with defaults
    loading        `load_config`: defaults, then a YAML file, then overrides `key=value`
    convert        plain values → dataclasses, with strict types and "did you mean"
    paths          `~` at the beginning of a path
    setting_types  what type a setting has: optional, list, closed list of choices
    checks         checks of one setting, and of settings against each other
    plan           the batch arithmetic of a run
    describe       the text of `--help`

The package imports `quadriga.errors` and, for reading overrides and YAML, hydra and omegaconf.
Every other package may import it. Import names from the modules: `quadriga.config.schema` loads no
library, `quadriga.config.loading` loads hydra.
"""
