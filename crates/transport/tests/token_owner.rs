//! A token file that belongs to another user is no secret of ours.

#![allow(clippy::unwrap_used)]

use ebb_transport::Token;
use std::os::unix::fs::chown;

#[test]
fn a_token_of_another_user_is_refused_by_name() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root gives files away");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    Token::generate_to(&path).unwrap();
    assert!(Token::load(&path).is_ok());
    chown(&path, Some(65_534), None).unwrap();
    let error = Token::load(&path).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()) && error.contains("65534"), "{error}");
}
