"""The floor: a loop without a framework that loads the weights, trains each user, and takes the mean."""

import task
import torch


def main() -> None:
    it = task.from_command_line()
    users = {number: it.user(number) for number in range(task.NUM_USERS)}
    network, times = it.network(), []
    parameters = list(network.parameters())  # the network has no buffers
    weights = [each.detach().clone() for each in parameters]
    for number in range(it.rounds):
        sums = [torch.zeros_like(each) for each in weights]
        for user in task.cohort(number):
            with torch.no_grad():
                torch._foreach_copy_(parameters, weights)
            task.train(network, *users[user])
            with torch.no_grad():
                torch._foreach_add_(sums, parameters)
        weights = [each / task.COHORT for each in sums]
        times.append(task.now())
    with torch.no_grad():
        torch._foreach_copy_(parameters, weights)
    task.report(it, times, network.state_dict())


if __name__ == "__main__":
    main()
