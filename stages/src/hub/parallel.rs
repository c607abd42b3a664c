//! Work on several files at a time.

use std::future::Future;
use std::panic;
use std::pin::pin;

use tokio::task::JoinSet;

use super::error::HubError;

/// How many files are fetched at a time.
pub(super) const PARALLEL_FILES: usize = 4;

/// Runs tasks, [`PARALLEL_FILES`] at a time, up to the first that fails, or until `stop`.
///
/// None of them is left when it returns: the runtime goes away next, and a task that is still at work, such as at the
/// checksum of what lies on disk, would then panic at its next timer.
pub(super) async fn in_tasks<T, W>(
    waiting: Vec<T>,
    run: impl Fn(T) -> W,
    stop: impl Future<Output = ()>,
) -> Result<(), HubError>
where
    W: Future<Output = Result<(), HubError>> + Send + 'static,
{
    let mut waiting = waiting.into_iter();
    let mut running = JoinSet::new();
    let mut stop = pin!(stop);
    let result = loop {
        while running.len() < PARALLEL_FILES {
            let Some(next) = waiting.next() else { break };
            running.spawn(run(next));
        }
        let ended = tokio::select! {
            ended = running.join_next() => ended,
            () = &mut stop => break Err(HubError::Stopped),
        };
        match ended {
            None => break Ok(()),
            Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => break Err(error),
            Some(Err(failure)) => panic::resume_unwind(failure.into_panic()),
        }
    };
    running.shutdown().await;
    result
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use tokio::runtime::Builder;
    use tokio::time::sleep;

    use super::*;

    #[test]
    fn no_task_is_left_where_one_fails_or_all_are_stopped() {
        const SOON: Duration = Duration::from_millis(50);
        let held = Arc::new(());
        let work = |fails: bool| {
            let held = Arc::clone(&held);
            async move {
                if fails {
                    sleep(SOON).await;
                    return Err(HubError::BadToken);
                }
                tokio::task::block_in_place(|| thread::sleep(SOON * 6));
                sleep(Duration::from_secs(60)).await;
                drop(held);
                Ok(())
            }
        };
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
        runtime.block_on(async {
            let failed = in_tasks(vec![true, false], work, pending()).await;
            assert!(matches!(failed, Err(HubError::BadToken)), "{failed:?}");
            assert_eq!(Arc::strong_count(&held), 1);
            let stopped = in_tasks(vec![false], work, sleep(SOON)).await;
            assert!(matches!(stopped, Err(HubError::Stopped)), "{stopped:?}");
            assert_eq!(Arc::strong_count(&held), 1);
        });
    }
}
