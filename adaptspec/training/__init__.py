"""Training small drafters: answers of the target, features of the answers, losses and trainers."""
