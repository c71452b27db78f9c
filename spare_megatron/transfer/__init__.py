"""State from group to group: what a learner needs of its donors, and how it travels beside the training."""
