// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

use super::*;
use crate::server::{Registrar, RegistrarOptions};

#[test]
fn another_protocol_version_is_refused_by_its_number() {
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    let registrar = Registrar::start_job(RegistrarOptions::from_config(1, &config)).unwrap();
    let deadline = Instant::now() + MAX_SERVER_WAIT;
    let client = TaskClient::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
    let request = wire::RegisterRequest { protocol_version: 99, ..Default::default() };
    let answer = client.inner.handle.block_on(async {
        client.inner.caller.grpc_stub().register(client.inner.caller.build_request(request)).await
    });
    let error = client.error_from_status("registration", &answer.unwrap_err());
    assert!(matches!(error, Error::Version { theirs: PROTOCOL_VERSION, .. }), "{error}");
}

#[test]
fn an_agent_that_was_silent_while_it_waited_registers_again() {
    let mut config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    // The shortest silence that counts is 3 s.
    config.peer_timeout = Duration::from_secs(1);
    let registrar = Registrar::start_job(RegistrarOptions::from_config(2, &config)).unwrap();
    let deadline = Instant::now() + MAX_SERVER_WAIT;
    let client = TaskClient::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
    client.register_task(0, &crate::local_host_facts::host_facts(), deadline).unwrap();
    let beat = wire::Beat { protocol_version: PROTOCOL_VERSION, session: client.inner.session };
    client.inner.handle.block_on(async {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        sender.send(beat).await.unwrap();
        let beats = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let request = client.inner.caller.build_request(beats);
        let mut directives =
            client.inner.caller.grpc_stub().heartbeat(request).await.unwrap().into_inner();
        let lost = |event: &crate::JobEvent| {
            matches!(event, crate::JobEvent::Lost { task: TaskId(0), .. })
        };
        while !registrar.drain_events(Instant::now()).unwrap().records.iter().any(lost) {
            assert!(Instant::now() < deadline, "it is not dropped");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        sender.send(beat).await.unwrap();
        let end = tokio::time::timeout(Duration::from_secs(5), directives.message()).await;
        assert!(matches!(end, Ok(Ok(None) | Err(_))), "the stream goes on: {end:?}");
    });
}

#[test]
fn records_are_not_waited_for_once_the_registrar_is_given_up() {
    let config = Config::read(|_| None, &std::collections::BTreeMap::new()).unwrap();
    let registrar = Registrar::start_job(RegistrarOptions::from_config(1, &config)).unwrap();
    let deadline = Instant::now() + MAX_SERVER_WAIT;
    let client = TaskClient::connect(registrar.ticket(), TaskId(0), None, deadline).unwrap();
    client.register_task(0, &crate::local_host_facts::host_facts(), deadline).unwrap();
    client.start_heartbeats(Duration::from_millis(500), drop);
    drop(registrar);
    client.send_log_line(OutputStream::Stdout, "a last line").unwrap();
    let flushed = client.flush_records(deadline);
    assert!(matches!(flushed, Err(Error::Lost { .. })), "{flushed:?}");
    assert!(matches!(client.put_value("key", b"value"), Err(Error::Lost { .. })));
}
