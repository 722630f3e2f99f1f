"""The floor: a loop without a framework that loads the weights, trains each user, and takes the mean."""

import task
import torch


def main() -> None:
    it = task.from_command_line()
    users = {number: it.user(number) for number in range(task.NUM_USERS)}
    network, weights, times = it.network(), it.weights, []
    for number in range(it.rounds):
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in weights.items()}
        for user in task.cohort(number):
            network.load_state_dict(weights)
            task.train(network, *users[user])
            for name, tensor in network.state_dict().items():
                sums[name] += tensor
        weights = {name: (tensor / task.COHORT).to(weights[name].dtype) for name, tensor in sums.items()}
        times.append(task.now())
    task.report(it, times, weights)


if __name__ == "__main__":
    main()
