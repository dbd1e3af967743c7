"""Simulated systems whose transition function is known: exact, seeded, with their states kept.

In continuous time the control is held between rows and the differential equation is solved to about ten digits (DOP853),
so that `Simulation.transition` is the true f of x[t+1] = f(x[t], c[t]) + N(0, process_scale^2). The same arguments and
seed give the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.integrate import solve_ivp

from gpssm.data import Dataset

States = Float[np.ndarray, "sample state"]
ControlRows = Float[np.ndarray, "sample control"]
Function = Callable[[States, ControlRows], States]

_GRAVITY = 9.82


@dataclass(frozen=True)
class Simulation:
    """Data, the states behind them, and f for many states and controls at once (rows; [sample, 0] without controls)."""

    dataset: Dataset
    states: tuple[Float[np.ndarray, "_ state"], ...]  # one [time, state] array a sequence
    state_names: tuple[str, ...]
    transition: Function


def kink(
    num_steps: int = 120,
    num_sequences: int = 1,
    process_scale: float = 0.05,
    observation_variance: float = 0.8,
    initial_state: float | None = None,
    *,
    seed: int,
) -> Simulation:
    """The kink function of Ialongo et al. (2019), one state, observed directly.

    f(x) = 0.8 + (x + 0.2) (1 - 5 / (1 + exp(-2 x))),  x[1] ~ N(0, 1) or `initial_state`,  y = x + N(0, 0.8).
    """

    def transition(states: States, controls: ControlRows | None = None) -> States:
        return 0.8 + (states + 0.2) * (1 - 5 / (1 + np.exp(-2 * states)))

    rng = np.random.default_rng(seed)
    first = rng.standard_normal((num_sequences, 1))
    first = first if initial_state is None else np.full_like(first, initial_state)
    controls = np.zeros((num_sequences, num_steps, 0))
    states = _roll_out(transition, first, controls, process_scale, rng)
    return _record(transition, states, controls, np.eye(1), [observation_variance**0.5], ("x",), rng)


def cart_pole(
    num_sequences: int = 30,
    num_steps: int = 20,
    initial_scale: float = 0.1,
    force_limit: float = 10.0,
    observation_scales: tuple[float, float, float, float] = (0.03, 0.1047, 0.4, 1.3963),
    process_scale: float = 0.0,
    cart_mass: float = 0.5,
    pole_mass: float = 0.5,
    pole_length: float = 0.5,
    friction: float = 0.1,
    sampling_time: float = 0.075,
    *,
    seed: int,
) -> Simulation:
    """A cart with a swinging pole (Deisenroth and Rasmussen 2011: PILCO), all four states seen through noise.

    With cart mass M, pole a thin rod of mass m and length l at the angle a from hanging, cart position p, force u
    (uniform in +-`force_limit`, drawn anew every step) and friction b between cart and ground:

        (M + m) p'' + m l / 2 (a'' cos a - a'^2 sin a) = u - b p',    2 l a'' + 3 p'' cos a + 3 g sin a = 0.

    States p, a, p', a', near N(0, `initial_scale`^2) at first. The default noise is that of Ialongo et al. (2019):
    3 cm, 6 degrees, and about these per 0.075 s for the velocities.
    """
    weight, total = pole_mass * pole_length, cart_mass + pole_mass

    def derivative(x, u):
        _, angle, speed, rate = x
        sine, cosine, push = np.sin(angle), np.cos(angle), u[0] - friction * speed
        bottom = 4 * total - 3 * pole_mass * cosine**2
        speeding = (2 * weight * rate**2 * sine + 3 * pole_mass * _GRAVITY * sine * cosine + 4 * push) / bottom
        turning = -3 * weight * rate**2 * sine * cosine - 6 * total * _GRAVITY * sine - 6 * push * cosine
        return np.stack([speed, rate, speeding, turning / (pole_length * bottom)])

    rng = np.random.default_rng(seed)
    transition = _hold(derivative, sampling_time)
    first = initial_scale * rng.standard_normal((num_sequences, 4))
    controls = rng.uniform(-force_limit, force_limit, (num_sequences, num_steps, 1))
    states = _roll_out(transition, first, controls, process_scale, rng)
    state_names = ("cart_position", "pole_angle", "cart_velocity", "pole_velocity")
    return _record(
        transition,
        states,
        controls,
        np.eye(4),
        observation_scales,
        state_names,
        rng,
        output_names=state_names,
        output_units=("m", "rad", "m/s", "rad/s"),
        control_names=("force",),
        control_units=("N",),
        sampling_time=sampling_time,
    )


def pendulum(
    num_sequences: int = 1,
    num_steps: int = 500,
    torque_limit: float = 2.0,
    hold: int = 5,
    observation_scale: float = 0.05,
    process_scale: float = 0.0,
    mass: float = 1.0,
    length: float = 1.0,
    damping: float = 0.2,
    initial_scale: float = 0.5,
    sampling_time: float = 0.1,
    *,
    seed: int,
) -> Simulation:
    """A damped pendulum (point mass) driven by a torque u, of which only the angle is seen.

    m l^2 a'' = -m g l sin a - b a' + u; states a and a'; u uniform in +-`torque_limit`, drawn every `hold` rows.
    """
    inertia = mass * length**2

    def derivative(x, u):
        angle, rate = x
        return np.stack(
            [rate, (u[0] - damping * rate - mass * _GRAVITY * length * np.sin(angle)) / inertia],
        )

    rng = np.random.default_rng(seed)
    transition = _hold(derivative, sampling_time)
    first = initial_scale * rng.standard_normal((num_sequences, 2))
    controls = _held(rng, -torque_limit, torque_limit, num_sequences, num_steps, hold)
    states = _roll_out(transition, first, controls, process_scale, rng)
    return _record(
        transition,
        states,
        controls,
        np.eye(2)[:1],
        [observation_scale],
        ("angle", "angular_velocity"),
        rng,
        output_names=("angle",),
        output_units=("rad",),
        control_names=("torque",),
        control_units=("N m",),
        sampling_time=sampling_time,
    )


def van_der_pol(
    num_sequences: int = 1,
    num_steps: int = 500,
    stiffness: float = 1.0,
    force_limit: float = 1.0,
    hold: int = 5,
    observation_scale: float = 0.1,
    process_scale: float = 0.0,
    sampling_time: float = 0.1,
    *,
    seed: int,
) -> Simulation:
    """The Van der Pol oscillator, pushed by u, of which only the position is seen.

    p'' = k (1 - p^2) p' - p + u; states p and p', at first N(0, 1); u uniform in +-`force_limit`, drawn every `hold` rows.
    With `force_limit` 0 there are no controls, and the states end on the limit cycle.
    """

    def derivative(x, u):
        position, speed = x
        push = u[0] if len(u) else 0.0
        return np.stack([speed, stiffness * (1 - position**2) * speed - position + push])

    rng = np.random.default_rng(seed)
    transition = _hold(derivative, sampling_time)
    first = rng.standard_normal((num_sequences, 2))
    controls = _held(rng, -force_limit, force_limit, num_sequences, num_steps, hold)
    controls = controls if force_limit else controls[..., :0]
    states = _roll_out(transition, first, controls, process_scale, rng)
    return _record(
        transition,
        states,
        controls,
        np.eye(2)[:1],
        [observation_scale],
        ("position", "velocity"),
        rng,
        output_names=("position",),
        control_names=("force",) if force_limit else (),
        sampling_time=sampling_time,
    )


def coupled_tanks(
    num_sequences: int = 1,
    num_steps: int = 500,
    voltage_limits: tuple[float, float] = (2.0, 10.0),
    hold: int = 10,
    observation_scale: float = 0.2,
    process_scale: float = 0.0,
    tank_area: float = 15.5,
    outlet_area: float = 0.178,
    pump_gain: float = 3.3,
    sampling_time: float = 4.0,
    *,
    seed: int,
) -> Simulation:
    """Two tanks in cascade: a pump at u volts fills the upper one, which drains into the lower one, whose level is seen.

    A h1' = k u - a sqrt(2 g h1),    A h2' = a sqrt(2 g h1) - a sqrt(2 g h2), in cm and s (Torricelli's law: the time
    constants grow with the levels). States h1 and h2, at first uniform in 2 ... 10 cm; u uniform in `voltage_limits`, drawn
    every `hold` rows. A level below zero (only process noise makes one) drains nothing.
    """
    gravity = 100 * _GRAVITY  # cm / s^2

    def derivative(x, u):
        upper, lower = outlet_area * np.sqrt(2 * gravity * np.maximum(x, 0.0))
        return np.stack([pump_gain * u[0] - upper, upper - lower]) / tank_area

    rng = np.random.default_rng(seed)
    transition = _hold(derivative, sampling_time)
    first = rng.uniform(2.0, 10.0, (num_sequences, 2))
    controls = _held(rng, *voltage_limits, num_sequences, num_steps, hold)
    states = _roll_out(transition, first, controls, process_scale, rng)
    return _record(
        transition,
        states,
        controls,
        np.eye(2)[1:],
        [observation_scale],
        ("upper_level", "lower_level"),
        rng,
        output_names=("lower_level",),
        output_units=("cm",),
        control_names=("pump_voltage",),
        control_units=("V",),
        sampling_time=sampling_time,
    )


def _hold(derivative: Callable, sampling_time: float) -> Function:
    """f of a differential equation whose control is held for one sampling time; all rows are solved as one system."""

    def transition(states: States, controls: ControlRows) -> States:
        num_samples, num_states = states.shape

        def flat(_, x):
            return derivative(x.reshape(num_states, num_samples), controls.T).ravel()

        solved = solve_ivp(flat, (0.0, sampling_time), states.T.ravel(), "DOP853", rtol=1e-11, atol=1e-12)
        if not solved.success:
            raise ValueError(f"the differential equation could not be solved from these states: {solved.message}")
        return solved.y[:, -1].reshape(num_states, num_samples).T

    return transition


def _held(rng, low, high, num_sequences, num_steps, hold):
    """[sequence, time, 1] uniform levels, each kept for `hold` rows."""
    levels = rng.uniform(low, high, (num_sequences, -(-num_steps // hold), 1))
    return np.repeat(levels, hold, axis=1)[:, :num_steps]


def _roll_out(transition: Function, first, controls, process_scale: float, rng):
    """[sequence, time, state] from the first states; the control of row t acts between rows t and t+1."""
    states = [first]
    for t in range(controls.shape[1] - 1):
        following = transition(states[-1], controls[:, t])
        states.append(following + process_scale * rng.standard_normal(following.shape))
    return np.stack(states, axis=1)


def _record(transition, states, controls, emission, scales, state_names, rng, sampling_time=None, **columns) -> Simulation:
    clean = states @ emission.T
    outputs = clean + np.asarray(scales) * rng.standard_normal(clean.shape)
    dataset = Dataset.from_arrays(
        list(outputs),
        list(controls) if controls.shape[2] else None,
        sampling_time=sampling_time,
        time_unit="s" if sampling_time else "",
        **columns,
    )
    return Simulation(dataset, tuple(states), tuple(state_names), transition)
