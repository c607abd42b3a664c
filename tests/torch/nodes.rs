//! Ranks on the nodes of a cluster: a real Slurm, whose nodes are emulated on this machine.

use test_harness::{Unmet, test};

use crate::bench::{Bench, PIPELINE};
use crate::slurm::{Cluster, Shape};
use crate::support::Ran;

#[test]
fn two_nodes_train_as_two_ranks_of_one_machine() -> Result<(), Unmet> {
    let mut bench = Bench::new()?;
    let cluster = Cluster::start(Shape { gpus: 0, ..Shape::default() })?;
    let expected = bench.trained_by_two_ranks();
    // What comes before the training is computed here, which takes less time than a job for each of its stages.
    bench.run(&["run", PIPELINE, "--until", "packs", "--until", "held_out_tokens"]).ends_with(0);
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURMD_NODENAME"];
    bench.witness(&names);
    let more = ["adapter.backend=torch", "adapter.resources.nodes=2"];
    let submit = ["run", PIPELINE, "--until", "adapter", "--executor", "slurm", "executor.slurm.poll=1s"];
    let arguments = [&submit[..], &more[..]].concat();
    let mut command = bench.command(&arguments);
    command.env("SLURM_CONF", cluster.configuration());
    Ran::of(command, &arguments).ends_with(0).says("computed by torch");

    let mut ranks = bench.witnessed();
    ranks.sort_by_key(|rank| rank["RANK"].to_string());
    let seen: Vec<Vec<&str>> =
        ranks.iter().map(|rank| names.iter().map(|name| rank[name].as_str().unwrap_or_default()).collect()).collect();
    assert_eq!(seen, [["0", "2", "0", "1", "127.0.0.1", "n1"], ["1", "2", "0", "1", "127.0.0.1", "n2"]]);
    let trained = bench.trained(&more);
    assert_eq!(trained.records, expected.records);
    assert_eq!(trained.weights, expected.weights);
    Ok(())
}
