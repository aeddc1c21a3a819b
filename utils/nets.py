"""Networks that several algorithms use, and distributions of actions."""

import math

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent

from utils.spaces import has_images, image_layout, is_image
from utils.stats import RunningStats


def mlp(sizes, activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers of these sizes, with the activation between them, not after the last."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class SquashedGaussian(Distribution):
    """Of tanh(a), where a ~ N(loc, sigma^2) has [..., k] independent dimensions.

    log_std is [k] or [..., k]. Samples, `mode` and `log_prob` are of a; the entropy is that of
    tanh(a). That of a has no maximum: a bonus on it drives all actions to the ends of their range.
    """

    arg_constraints = {}  # printing needs it
    # Gauss-Hermite quadrature: for z ~ N(0, 1), E f(z) is about f(points) @ weights. Entropies
    # are right to 0.001 for sigma up to 1 and to 0.03 for 2; beyond, errors grow, to 0.9 for 10.
    points, weights = map(torch.Tensor, np.polynomial.hermite_e.hermegauss(8))
    weights /= weights.sum()

    def __init__(self, loc: Tensor, log_std: Tensor):
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)
        self.loc = loc
        self.log_std = log_std.clone()  # so that it stays as it is when the weights move

    mode = property(lambda self: self.loc)

    @torch.no_grad()
    def sample(self) -> Tensor:
        return self.loc + self.log_std.exp() * torch.randn_like(self.loc)

    def log_prob(self, act: Tensor) -> Tensor:  # Independent(Normal) takes 18% more of PPO's time
        z = (act - self.loc) / self.log_std.exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        """H(tanh(a)) = H(a) + E log(1 - tanh(a)^2), at most log 2 in each dimension.

        log(1 - tanh(a)^2) = 2 (log 2 - a - softplus(-2a)), and the mean of a is loc.
        """
        acts = self.loc[..., None] + self.log_std.exp()[..., None] * self.points.to(self.loc)
        softplus = nn.functional.softplus(-2 * acts) @ self.weights.to(self.loc)  # its mean
        gaussian = self.log_std + 0.5 * math.log(2 * math.pi * math.e)
        return (gaussian + 2 * (math.log(2) - self.loc - softplus)).sum(-1)


def categoricals(logits: Tensor, sizes: list[int]) -> Distribution:
    """Return the distribution of k independent choices [..., k]. Choice i has sizes[i] logits.

    It computes with k max(sizes) logits, so one choice among 1,000 makes all slow.
    """
    most = max(sizes)  # the others get values of probability 0
    parts = [nn.functional.pad(part, (0, most - part.shape[-1]), value=-math.inf)
             for part in logits.split(sizes, -1)]
    choices = Categorical(logits=torch.stack(parts, -2), validate_args=False)
    return Independent(choices, 1, validate_args=False)


class ObsStats(RunningStats):
    """Running statistics of all that is no image, which stays as it is."""

    def __init__(self, space: gym.Space):
        self.image, self.vectors = is_image(space), getattr(space, "vectors", None)
        super().__init__(space.shape if self.vectors is None else self.vectors.shape)

    def normalize(self, obs: Tensor) -> Tensor:
        if self.image or self.vectors is None:
            return obs if self.image else super().normalize(obs)
        index = torch.as_tensor(self.vectors, device=obs.device)
        return obs.index_copy(-1, index, super().normalize(obs[..., index]))

    def update(self, rows: Tensor) -> None:
        if not self.image:
            super().update(rows if self.vectors is None else rows[..., self.vectors])


def make_encoder(space: gym.Space, bf16: bool = False) -> nn.Module:
    """Return a network from observations to features [B, k]: an `ImageEncoder` for each image."""
    if is_image(space):
        return ImageEncoder(space, bf16)
    return JointEncoder(space.leaves, bf16) if has_images(space) else nn.Identity()


class JointEncoder(nn.ModuleList):
    """The parts of a Dict side by side [B, n] -> features [B, k], with each image encoded."""

    def __init__(self, parts: list[gym.Space], bf16: bool):
        super().__init__(nn.Sequential(nn.Unflatten(1, part.shape), ImageEncoder(part, bf16))
                         if is_image(part) else nn.Identity() for part in parts)
        self.sizes = [gym.spaces.flatdim(part) for part in parts]

    def forward(self, obs: Tensor) -> Tensor:
        parts = zip(self, obs.float().split(self.sizes, -1))
        return torch.cat([encode(part) for encode, part in parts], -1)


def head_sizes(space: gym.Space, hidden: tuple[int, ...]) -> tuple[int, ...]:
    """Return the widths behind `make_encoder`: of its features, and `hidden` but for an image."""
    if is_image(space):
        return cnn_out(space)
    parts = getattr(space, "leaves", [space])
    return sum(cnn_out(part)[0] if is_image(part) else gym.spaces.flatdim(part)
               for part in parts), *hidden


def cnn_out(space: gym.Space) -> tuple[int]:
    """Return the shape of what `ImageEncoder` makes of an image of this space: (512,) or (128,)."""
    return (128,) if min(np.delete(space.shape, image_layout(space.shape)[0])) < 36 else (512,)


class ImageEncoder(nn.Sequential):
    """A network from images of a space, uint8 [B, C, H, W] or [B, H, W, C], to features.

    It is that of Mnih et al. 2015 (Nature 518, 529), to [B, 512], or, for images with a side under
    36 pixels, that of Young & Tian 2019 (arXiv:1903.03176) for MinAtar, to [B, 128].
    `bf16`: compute in bfloat16. Weights and outputs are float32 all the same.
    """

    def __init__(self, space: gym.Space, bf16: bool = False):
        axis, _ = image_layout(space.shape)  # of the channels
        channels, (height, width) = space.shape[axis], np.delete(space.shape, axis).tolist()
        if cnn_out(space) == (128,):
            layers = [nn.Conv2d(channels, 16, kernel_size=3), nn.ReLU(), nn.Flatten()]
        else:
            layers = [nn.Conv2d(channels, 32, kernel_size=8, stride=4), nn.ReLU(),
                      nn.Conv2d(32, 64, kernel_size=4, stride=2), nn.ReLU(),
                      nn.Conv2d(64, 64, kernel_size=3), nn.ReLU(), nn.Flatten()]
        num_features = nn.Sequential(*layers)(torch.zeros(1, channels, height, width)).shape[1]
        super().__init__(*layers, nn.Linear(num_features, *cnn_out(space)), nn.ReLU())
        self.axis, self.bf16 = axis, bf16

    def forward(self, images: Tensor) -> Tensor:
        if self.axis == 2:  # of [H, W, C]
            images = images.movedim(-1, 1)
        # The colours of a pixel lie side by side in memory: a gradient takes 0.8 of the time.
        images = images.contiguous(memory_format=torch.channels_last)
        floats = images.to(torch.bfloat16 if self.bf16 else torch.float32, copy=True).div_(255)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return super().forward(floats).float()
