//! The address at which a command serves: that one, and never another.

use std::net::{SocketAddr, TcpListener};

use crate::render::{Exit, Failure, Message};

/// Listens at an address and a port; 0 is any that is free.
///
/// # Errors
/// Fails where another program listens there, or the machine has no such address.
pub(crate) fn listen(host: &str, port: u16) -> Result<(TcpListener, SocketAddr), Failure> {
    let bound = TcpListener::bind((host, port)).and_then(|listener| {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    bound.map_err(|error| {
        let taken = error.kind() == std::io::ErrorKind::AddrInUse;
        let message = Message::new(format!("cannot listen at {host}:{port}: {error}"));
        let failure = Failure::Told { exit: Exit::Machine, message };
        failure.with_help_if(taken.then(|| "another program listens there: name another `--port`".to_owned()))
    })
}
