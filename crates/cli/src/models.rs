//! Which model names are known: the built-in ones and those that the config file defines.

use crate::exit::{Context, Failure};
use crate::settings::Settings;
use ebb_consistency::ModelTable;
use ebb_fs_client::Rules;
use ebb_fs_client::config::MountConfig;

/// The models of a job whose config file holds these `[models]` tables.
pub fn table(models_toml: &str) -> Result<ModelTable, Failure> {
    ModelTable::builtin().with_user(models_toml).or_usage("config file, [models]")
}

/// Checks the models that a mount names.
pub fn check(config: &MountConfig) -> Result<(), Failure> {
    let table = table(&config.models_toml)?;
    known(&table, &config.consistency, "--consistency")?;
    config
        .rules
        .iter()
        .try_for_each(|r| known(&table, &r.model, &format!("--rule {}={}", r.glob, r.model)))
}

/// The job's model and rules as text. Nodes of one job must agree on it.
pub fn job_text(config: &MountConfig) -> Result<String, Failure> {
    let rules = Rules::new(config).map_err(|e| Failure::usage(e.to_string()))?;
    Ok(rules.describe())
}

/// A built-in model as the text that nodes without rules agree on.
pub fn describe(name: &str) -> Result<String, Failure> {
    let table = table("")?;
    known(&table, name, "--consistency")?;
    Ok(table.get(name).map(|m| m.describe()).unwrap_or_default())
}

/// Checks the models that settings name, before there is anything to mount.
pub fn check_names(settings: &Settings) -> Result<(), Failure> {
    let table = table(&settings.models_toml)?;
    known(
        &table,
        settings.text("consistency").unwrap_or_default(),
        &settings.named("consistency"),
    )?;
    let models = settings.value("rule").parts.iter().filter_map(|r| r.rsplit_once('='));
    for (_, model) in models {
        known(&table, model, &settings.named("rule"))?;
    }
    Ok(())
}

/// Is there a model of that name? `setting` is who asks, for the message.
pub fn known(table: &ModelTable, name: &str, setting: &str) -> Result<(), Failure> {
    if table.get(name).is_some() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{setting}: unknown model '{name}' (known: {}; a [models.{name}] table in the config file \
         would define it)",
        table.names().join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_models_are_named_together_with_the_known_ones() {
        let table = table("").unwrap();
        for name in ["posix", "commit", "session", "mpiio"] {
            assert!(known(&table, name, "--consistency").is_ok());
        }
        let e = known(&table, "sesion", "--consistency").unwrap_err();
        assert!(e.status == 2 && e.text.contains("'sesion'") && e.text.contains("session"), "{e}");
    }
}
